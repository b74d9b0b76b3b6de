"""A model at rest: the state of its parameters, buffers, batch norms and optimizer while nothing runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook.core.selection import plain, unwrapped
from torchhook.core.shards import local, shards_of_gathered
from torchhook.core.torch_internals import BATCH_NORMS
from torchhook.rules.step import wants_closure
from torchhook.stats import Moments
from torchhook.stats.moments import Summary

_SCALE_FREE = {"betas", "eps", "etas", "history_size"}  # options of optimizers that divide by a gradient's size


@dataclass(frozen=True)
class ParameterState:
    """The values of a parameter, and how the optimizer trains it."""

    summary: Summary
    weights: int  # per unit
    trainable: bool
    alike: bool  # whether all its units have the same weights
    groups: tuple[int, ...] = ()  # of the optimizer
    lr: float | None = None
    dtype: torch.dtype = torch.float32
    eps: float | None = None  # by which the optimizer keeps from dividing by zero
    decay: float = 0.0
    module: str = ""  # the class of its module

    @property
    def units(self) -> int:
        """How many units it has."""
        return round(self.summary.count) // max(self.weights, 1)

    @property
    def is_zero(self) -> bool:
        """Whether all its values are zero."""
        return self.summary.zero_fraction == 1

    @property
    def is_matrix(self) -> bool:
        """Whether it has units with several weights each."""
        return self.weights > 1


@dataclass(frozen=True)
class NormState:
    """The state of a batch norm."""

    training: bool
    batches: int | None  # how many it has averaged over
    momentum: float | None
    mean: Tensor
    var: Tensor


@dataclass(frozen=True)
class Rest:
    """The state of a model at rest, by path."""

    parameters: dict[str, ParameterState]
    buffers: dict[str, Summary]
    norms: dict[str, NormState]
    has_optimizer: bool = False
    strangers: int = 0  # parameters of the optimizer that are not in the model
    installed: frozenset[str] = frozenset()  # modules whose class is from an installed package
    searches: bool = False  # whether the optimizer chooses the length of its steps, by calling a closure
    is_scale_free: bool = False  # whether the optimizer's steps do not depend on the scale of the gradients


@torch.no_grad()
def at_rest(model: nn.Module, optimizer: Any = None) -> Rest:
    """The current state of `model`; this waits for the device.

    >>> rest = at_rest(nn.Linear(2, 3))
    >>> rest.parameters["weight"].trainable, rest.parameters["weight"].alike
    (True, False)
    """
    groups = [] if optimizer is None else optimizer.param_groups
    model = unwrapped(model)
    shards = shards_of_gathered(model)  # which are what is trained
    own_parameters = ((path, shards.get(id(p), p)) for path, p in model.named_parameters())
    known = {plain(path): p for path, p in own_parameters if not is_lazy(p) and not p.is_meta}
    own = {id(parameter) for parameter in known.values()}
    buffers = {plain(path): buffer for path, buffer in model.named_buffers() if _is_measurable(buffer)}
    classes = {plain(path): type(module).__name__ for path, module in model.named_modules()}
    return Rest(
        parameters={
            path: _parameter(parameter, groups, classes.get(path.rpartition(".")[0], ""))
            for path, parameter in known.items()
        },
        buffers={path: Moments().of(buffer) for path, buffer in buffers.items()},
        norms={plain(path): _norm(module) for path, module in model.named_modules() if _is_tracking(module)},
        has_optimizer=optimizer is not None,
        searches=hasattr(optimizer, "step") and wants_closure(optimizer),
        is_scale_free=bool(groups) and all(_SCALE_FREE & group.keys() for group in groups),
        strangers=sum(id(parameter) not in own for group in groups for parameter in group["params"]),
        installed=frozenset(installed_modules(model)),
    )


def installed_modules(model: nn.Module) -> Iterator[str]:
    """The paths of modules whose class is from an installed package; a container belongs to the module around it."""
    known: dict[str, bool] = {}
    for path, module in model.named_modules():
        around = known.get(path.rpartition(".")[0], False)
        is_container = type(module) in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        known[path] = around if is_container else is_installed(type(module))
        if known[path]:
            yield plain(path)


def is_installed(cls: type[Any]) -> bool:
    """Whether a class is from an installed package.

    >>> is_installed(nn.Linear)
    True
    """
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _parameter(parameter: nn.Parameter, groups: list[dict[str, Any]], module: str) -> ParameterState:
    here = local(parameter.detach())  # of a sharded parameter, what is here: no rank may have to wait for others
    inside = [number for number, group in enumerate(groups) if any(p is parameter for p in group["params"])]
    return ParameterState(
        summary=Moments().of(parameter),
        weights=math.prod(parameter.shape[1:]) if parameter.dim() and len(parameter) else 0,
        trainable=parameter.requires_grad,
        alike=here.dim() > 1 and len(here) > 1 and bool((here == here[:1]).all()),
        groups=tuple(inside),
        lr=max((rate for number in inside if (rate := rate_of(groups[number])) is not None), default=None),
        dtype=parameter.dtype,
        eps=min((eps for number in inside if (eps := _eps(groups[number])) is not None), default=None),
        decay=max((float(groups[number].get("weight_decay") or 0) for number in inside), default=0.0),
        module=module,
    )


def _eps(group: dict[str, Any]) -> float | None:
    """What is added to a denominator in the parameter's own precision; None if nothing is."""
    eps = group.get("eps")
    if group.get("fused") or not isinstance(eps, (int, float)):  # fused kernels compute in float32
        return None
    return float(eps)


def rate_of(group: dict[str, Any]) -> float | None:
    """The learning rate of a group, before any schedule; None if it has none, as with optimizers that choose it."""
    rate = group.get("initial_lr", group.get("lr"))
    return None if rate is None else float(rate)


def _norm(module: BATCH_NORMS) -> NormState:
    tracked = module.num_batches_tracked
    assert module.running_mean is not None
    assert module.running_var is not None
    return NormState(
        training=module.training,
        batches=None if tracked is None else int(tracked),
        momentum=module.momentum,
        mean=module.running_mean.double().cpu(),
        var=module.running_var.double().cpu(),
    )


def _is_tracking(module: nn.Module) -> bool:
    return isinstance(module, BATCH_NORMS) and module.running_mean is not None and not module.running_mean.is_meta


def _is_measurable(buffer: Tensor) -> bool:
    return buffer.is_floating_point() and not buffer.is_meta and not is_lazy(buffer) and buffer.numel() > 0
