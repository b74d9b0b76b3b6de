"""A copy of a model and its optimizer, so that the originals stay unchanged."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer


def copies_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
    """A copy of the model, and a copy of the optimizer that trains it.

    >>> model = nn.Linear(2, 2)
    >>> twin, optimizer = copies_of(model, torch.optim.SGD(model.parameters(), 0.1))
    >>> optimizer.param_groups[0]["params"][0] is twin.weight
    True
    """
    refused = _refusal(model)
    if refused:
        raise ValueError(f"{refused}; or pass parts=('rest',), which does not run it")
    memo: dict[int, Any] = {}
    try:
        twin = copy.deepcopy(model, memo)
        _rebind(model, memo)
        _separate(twin, shared_between(model, twin), memo)
        for module in twin.modules():
            if isinstance(module, nn.RNNBase):  # cuDNN wants its weights in one block, and warns about copies
                module.flatten_parameters()
        return twin, None if optimizer is None else _copy_of(optimizer, memo)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and diagnose must not change the original;"
            " pass parts=('rest',), which needs no copy"
        ) from error


def shared_between(model: nn.Module, twin: nn.Module) -> list[str]:
    """The parameters and buffers of a copy that share memory with the original, by a `__deepcopy__` of its own.

    >>> model = nn.Linear(2, 2)
    >>> shared_between(model, copy.deepcopy(model)), shared_between(model, nn.Sequential(model))
    ([], ['0.weight', '0.bias'])
    """
    own = {tensor.data_ptr() for _, tensor in _tensors(model)}
    return [name for name, tensor in _tensors(twin) if tensor.data_ptr() in own]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters and buffers of a model that have memory of their own, by all of their names."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return (
        (name, one) for name, one in named if type(one) in (Tensor, nn.Parameter) and one.numel() and one.data_ptr()
    )


def _separate(twin: nn.Module, names: Sequence[str], memo: dict[int, Any]) -> None:
    """Give a copy its own memory for what it shares with the original."""
    own: dict[int, Tensor] = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        module = twin.get_submodule(path)
        shared: Tensor = getattr(module, attribute)
        fresh = shared.detach().clone()
        if isinstance(shared, nn.Parameter):
            fresh = nn.Parameter(fresh, shared.requires_grad)
        setattr(module, attribute, own.setdefault(id(shared), fresh))
        memo[id(shared)] = own[id(shared)]


def _rebind(model: nn.Module, memo: dict[int, Any]) -> None:
    """Make functions that were set on a module, such as a new `forward`, use the copy: `deepcopy` shares functions."""
    known = {id(module): memo[id(module)] for module in model.modules() if id(module) in memo}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, (FunctionType, MethodType, partial)) and id(module) in known:
                known[id(module)].__dict__[name] = _rebound(value, known, {})


def _rebound(value: Any, known: dict[int, nn.Module], done: dict[int, Any]) -> Any:
    """A function with the modules that it refers to replaced: bound, in its closure, as defaults or by name."""
    if id(value) in known:
        return known[id(value)]
    if id(value) in done:
        return done[id(value)]
    if isinstance(value, MethodType):
        return MethodType(_rebound(value.__func__, known, done), _rebound(value.__self__, known, done))
    if isinstance(value, partial):
        args = [_rebound(one, known, done) for one in value.args]
        keywords = {name: _rebound(one, known, done) for name, one in value.keywords.items()}
        return partial(_rebound(value.func, known, done), *args, **keywords)
    if not isinstance(value, FunctionType):
        return value
    named = {name: value.__globals__.get(name) for name in value.__code__.co_names}
    globals_ = {name: known[id(one)] for name, one in named.items() if id(one) in known}
    cells = tuple(CellType() for _ in value.__closure__ or ())
    copied = FunctionType(value.__code__, {**value.__globals__, **globals_} if globals_ else value.__globals__,
                          value.__name__, None, cells or None)  # fmt: skip
    done[id(value)] = copied
    for old, new in zip(value.__closure__ or (), cells, strict=True):
        with suppress(ValueError):  # an empty cell
            new.cell_contents = _rebound(old.cell_contents, known, done)
    copied.__defaults__ = value.__defaults__ and tuple(_rebound(one, known, done) for one in value.__defaults__)
    copied.__kwdefaults__ = value.__kwdefaults__
    copied.__dict__.update(value.__dict__)
    return copied


def _refusal(model: nn.Module) -> str:
    if isinstance(model, torch.jit.ScriptModule):
        return "the model is compiled by torch.jit and cannot be inspected: pass the original module"
    lazy = next((path for path, parameter in model.named_parameters() if is_lazy(parameter)), None)
    return "" if lazy is None else f"{lazy!r} is not initialised yet: run the model once first"


def _copy_of(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
    """A copy with all attributes (`copy.deepcopy` keeps only some), except hooks and overridden methods.

    A scheduler overrides `step` on the instance with one that steps the original.
    """
    twin: Optimizer = type(optimizer).__new__(type(optimizer))
    memo[id(optimizer)] = twin
    for name, value in vars(optimizer).items():
        is_hooks = name.endswith("_hooks") and isinstance(value, OrderedDict)
        if not (callable(value) and hasattr(type(optimizer), name)):
            twin.__dict__[name] = OrderedDict() if is_hooks else copy.deepcopy(value, memo)
    return twin
