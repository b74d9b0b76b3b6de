"""What a comparison needs to know about a module: plain data, so that it can also come from a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from torchhook.captures.agreement.rounding import INT8, TF32, spacing
from torchhook.core.selection import plain
from torchhook.core.torch_internals import CONVOLUTIONS, DROPOUTS, submodules

_QUANTIZED = ("torch.ao.nn.", "torchao.")


@dataclass(frozen=True)
class ModuleFacts:
    """A module as a comparison sees it.

    >>> facts = facts_of(nn.LayerNorm(4, eps=1e-3))
    >>> facts.kind, facts.is_leaf, facts.parameters["weight"], facts.numbers["eps"]
    ('LayerNorm', True, (4,), 0.001)
    """

    kind: str  # its class
    is_leaf: bool  # whether no module is called inside
    is_passive: bool = False  # whether it returns its input in eval mode
    is_dropout: bool = False
    training: bool = False
    epsilon: float = 0.0  # the coarsest machine epsilon among its own parameters and what it computes with
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)  # shapes, including those of submodules
    numbers: dict[str, float] = field(default_factory=dict)  # attributes that may say how it computes, such as eps
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # the same, such as a stride

    @property
    def size(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.parameters.values())

    @property
    def is_idle(self) -> bool:
        """Whether it returns its input."""
        return self.is_passive and not self.training

    @property
    def fan_in(self) -> float:
        """About how many products each output of the module itself sums up."""
        return _terms(shape for name, shape in self.parameters.items() if "." not in name)

    @property
    def terms(self) -> float:
        """About how many products the longest sum in the module and its submodules has."""
        return _terms(self.parameters.values())


class KnownModules(dict[nn.Module, ModuleFacts]):
    """The facts of each module as of its first call."""

    def __missing__(self, module: nn.Module) -> ModuleFacts:
        found = self[module] = facts_of(module)
        return found


def facts_of(module: nn.Module) -> ModuleFacts:
    """What is known of a module now."""
    settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = [spacing(parameter) for parameter in module.parameters(recurse=False)]
    return ModuleFacts(
        kind=type(module).__name__,
        is_leaf=is_leaf(module),
        is_passive=isinstance(module, (DROPOUTS, nn.Identity)),
        is_dropout=isinstance(module, DROPOUTS),
        training=module.training,
        epsilon=max([_reduced_precision(module), *own]),
        parameters={plain(name): tuple(parameter.shape) for name, parameter in module.named_parameters()},
        numbers={name: float(value) for name, value in settings.items() if type(value) in (int, float)},
        sizes={name: value for name, value in settings.items() if isinstance(value, tuple) and _are_sizes(value)},
    )


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no submodules, not counting those in which a quantized one keeps its weights."""
    return not submodules(module) or _is_quantized(module)


def _terms(shapes: Iterable[tuple[int, ...]]) -> float:
    weights = [shape for shape in shapes if len(shape) > 1 and shape[0]]
    return max((math.prod(shape[1:]) for shape in weights), default=1.0)


def _is_quantized(module: nn.Module) -> bool:
    """Whether it is quantized; its submodules then only hold its weights."""
    return type(module).__module__.startswith(_QUANTIZED)


def _reduced_precision(module: nn.Module) -> float:
    """The machine epsilon of a module that computes with less precision than its dtype has; 0 if it does not."""
    if _is_quantized(module):
        return INT8
    first = next(module.parameters(recurse=False), None)
    if first is None or first.device.type != "cuda" or first.dtype != torch.float32:
        return 0.0
    convolves = isinstance(module, CONVOLUTIONS)
    fast = torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32
    return TF32 if fast else 0.0


def _are_sizes(values: tuple[object, ...]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
