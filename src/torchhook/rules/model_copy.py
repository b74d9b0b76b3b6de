"""A copy of a model and its optimizer, so that the originals stay unchanged."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import nn
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
        for module in twin.modules():
            if isinstance(module, nn.RNNBase):  # cuDNN wants its weights in one block, and warns about copies
                module.flatten_parameters()
        return twin, None if optimizer is None else _copy_of(optimizer, memo)
    except Exception as error:
        raise ValueError(
            f"the model cannot be copied ({type(error).__name__}: {error}), and diagnose must not change the original;"
            " pass parts=('rest',), which needs no copy"
        ) from error


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
