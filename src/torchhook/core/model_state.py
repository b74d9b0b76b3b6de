"""Run a model without leaving a trace: its modes, its buffers and the random numbers are put back afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.eager import eagerly
from torchhook.core.selection import require_module
from torchhook.core.torch_internals import is_dynamo_loaded, own_buffers, submodules

_TORCHS = frozenset(vars(nn.Module()))
"""The attributes that every module has, such as its parameters, hooks and mode."""


def parts(model: nn.Module) -> list[nn.Module]:
    """The model and all modules inside it, each once, in any order: much faster than ``modules()``.

    >>> len(parts(nn.Sequential(nn.ReLU(), nn.Sequential(nn.ReLU()))))
    4
    """
    found, waiting = {model}, [model]
    while waiting:
        for child in submodules(waiting.pop()).values():
            if child is not None and child not in found:
                found.add(child)
                if submodules(child):  # most have none
                    waiting.append(child)
    return list(found)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Put every module into eval mode inside the block, and restore each one's mode after it; yields the modules.

    >>> model = nn.Sequential(nn.Dropout().eval(), nn.Dropout())
    >>> with evaluating(model):
    ...     print([module.training for module in model])
    [False, False]
    >>> [module.training for module in model]
    [False, True]
    """
    modules = parts(model)
    training = [module for module in modules if module.training]
    try:
        for module in training:  # not .eval(), which some models override
            module.training = False
        yield modules
    finally:
        for module in training:
            module.training = True


@contextmanager
def training(model: nn.Module, but: Collection[nn.Module] = ()) -> Iterator[None]:
    """Put every module into train mode inside the block, except some, and restore each one's mode after it.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).eval()
    >>> with training(model, but=[model[1]]):
    ...     print([module.training for module in model])
    [True, False]
    >>> [module.training for module in model]
    [False, False]
    """
    modes = {module: module.training for module in parts(model)}
    try:
        for module in modes:
            module.training = module not in but
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` after the block, even if a forward writes to them.

    >>> model = nn.BatchNorm1d(2)
    >>> with buffers_kept(model):
    ...     _ = model(torch.rand(3, 2))
    >>> model.num_batches_tracked
    tensor(0)
    """
    buffers = [
        (own_buffers(module), name, buffer, buffer.clone())
        for module in parts(model)
        for name, buffer in own_buffers(module).items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer
                if not torch.equal(buffer, value):  # otherwise keep its version, since a graph may have saved it
                    buffer.copy_(value)


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Restore what modules keep in plain attributes, such as a state that a forward leaves for the next one.

    >>> class Counter(nn.Module):
    ...     calls = ()
    ...     def forward(self, x):
    ...         self.calls = (*self.calls, x)
    >>> model = Counter()
    >>> with attributes_kept(model):
    ...     _ = model(torch.ones(1))
    >>> model.calls
    ()
    """
    kept = [(module, dict(_own(module))) for module in parts(model)]
    values = [value for _, attributes in kept for value in attributes.values()]
    written = [(one, one.detach().clone()) for value in values for one in _tensors(value)]
    filled = [(value, value.copy()) for value in values if type(value) in (list, dict)]
    try:
        yield
    finally:
        for module, attributes in kept:
            for name in [name for name, _ in _own(module) if name not in attributes]:
                del vars(module)[name]
            vars(module).update(attributes)
        for container, contents in filled:
            container.clear()
            container.extend(contents) if isinstance(container, list) else container.update(contents)
        with torch.no_grad():
            for tensor, contents in written:
                if not torch.equal(tensor, contents):
                    tensor.copy_(contents)


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that are neither torch's nor functions, such as another forward."""
    return ((name, value) for name, value in vars(module).items() if name not in _TORCHS and not callable(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    """A tensor, or those in lists, tuples and dicts of them."""
    if type(value) is Tensor:
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


@contextmanager
def random_state_kept(*models: nn.Module) -> Iterator[None]:
    """Restore every random number generator after the block: Python's, NumPy's, torch's, those of the GPUs in use, and
    those that modules keep as attributes.

    >>> before = torch.get_rng_state()
    >>> with random_state_kept():
    ...     _ = torch.rand(3)
    >>> torch.get_rng_state().equal(before)
    True
    """
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    devices = {p.device.index or 0 for model in models for p in model.parameters() if p.device.type == "cuda"}
    rewinds = [rewind for model in models for rewind in _rewinds(model)]
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
        for rewind in rewinds:
            rewind()


def _rewinds(model: nn.Module) -> Iterator[Callable[[], object]]:
    """For each generator that a module keeps as an attribute, a function that puts it back to its present state."""
    for value in (value for module in parts(model) for _, value in _own(module)):
        if isinstance(value, torch.Generator):
            yield partial(value.set_state, value.get_state())
        elif isinstance(value, random.Random):
            yield partial(value.setstate, value.getstate())
        elif hasattr(value, "bit_generator"):  # of NumPy
            yield partial(setattr, value.bit_generator, "state", value.bit_generator.state)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers of `model` and every random number generator after the block."""
    with buffers_kept(model), random_state_kept(model):
        yield


@contextmanager
def inference(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Run `model` in eval mode, eagerly and without autograd, which may be switched on inside the block.

    Yields all its modules, in any order: a model has many, and finding them takes time.
    """
    require_module(model)
    # Autograd cannot be switched on halfway through a compiled graph.
    uncompiled = eagerly() if is_dynamo_loaded() else nullcontext()
    with evaluating(model) as modules, torch.inference_mode(False), torch.no_grad(), uncompiled:
        yield modules
