"""A model as it is used, not as it is trained, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def parts(model: nn.Module) -> list[nn.Module]:
    """The model and all modules inside, each once, in whatever order: a fraction of the time of ``modules()``.

    >>> len(parts(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))))
    4
    """
    found, waiting = {model}, [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in found:
                found.add(child)
                waiting.append(child)
    return list(found)


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
    training = [module for module in parts(model) if module.training]
    try:
        for module in training:  # not .eval(), which some models override
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
