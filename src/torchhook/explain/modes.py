"""A model as it is used, not as it is trained, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torchhook.core.selection import walk


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside the block, and each as it was after it.

    >>> model = nn.Sequential(nn.Dropout().eval(), nn.Dropout())
    >>> with evaluating(model):
    ...     print([module.training for module in model])
    [False, False]
    >>> [module.training for module in model]
    [False, True]
    """
    training = [module for _, module in walk(model) if module.training]
    try:
        for module in training:  # not .eval(), which some models override
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
