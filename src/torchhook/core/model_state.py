"""A model as it is used, not as it is trained, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
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


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Whatever a forward writes to the buffers of `model` inside the block, they are as they were after it.

    >>> model = nn.BatchNorm1d(2)
    >>> with buffers_kept(model):
    ...     _ = model(torch.rand(3, 2))
    >>> model.num_batches_tracked
    tensor(0)
    """
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in parts(model)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer
                buffer.copy_(value)
