"""Detours around torch's fused fast paths, which run modules without calling them.

In eval mode ``nn.TransformerEncoderLayer`` hands its weights to one fused kernel; hooks inside turn that
off by themselves. ``nn.TransformerEncoder`` packs a padded batch into a nested tensor, on which only the
kernel works. ``nn.MultiheadAttention`` never calls its ``out_proj`` on any path. Where a tap lies under
one of them the detour is taken, and left again with the session.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import activation

from torchhook.core.forward_patch import ForwardPatch
from torchhook.core.text import warn

_FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


_nested: weakref.WeakKeyDictionary[nn.TransformerEncoder, int] = weakref.WeakKeyDictionary()  # how often, by encoder


class Detour(ForwardPatch):
    """The forward of an attention that calls all its modules."""


class Detours:
    """The detours of one session."""

    def __init__(self) -> None:
        self.nested: list[nn.TransformerEncoder] = []
        self.unfused: list[ForwardPatch] = []
        self.warned = False

    def take(self, modules: Iterable[nn.Module], targets: AbstractSet[int]) -> None:
        """Make a detour around every fast path among `modules` that has one of `targets` (ids) inside."""
        fused = [module for module in modules if isinstance(module, _FUSED)]
        for module in dict.fromkeys(fused):
            inside = {id(part) for part in module.modules()}
            if not isinstance(module, nn.TransformerEncoderLayer):
                inside.discard(id(module))
            if inside & targets:
                self._take(module, targets)

    def leave(self) -> None:
        """Back to the fast paths."""
        for encoder in self.nested:
            _nested[encoder] -= 1
            if not _nested[encoder]:
                del _nested[encoder]
                encoder.use_nested_tensor = True
        self.nested.clear()
        for patch in self.unfused:
            patch.remove()

    def _take(self, module: nn.Module, targets: AbstractSet[int]) -> None:
        if isinstance(module, nn.TransformerEncoder) and (
            getattr(module, "use_nested_tensor", False) or module in _nested
        ):
            module.use_nested_tensor = False
            _nested[module] = _nested.get(module, 0) + 1
            self.nested.append(module)
        if isinstance(module, nn.MultiheadAttention):
            if id(module.out_proj) not in targets or type(module).forward is not nn.MultiheadAttention.forward:
                return
            if not isinstance(vars(module).get("forward", Detour), (type, Detour)):
                return  # somebody else's forward: what it calls, it calls
            self.unfused.append(Detour(module, _unfused(module)))
        if torch.backends.mha.get_fastpath_enabled() and not module.training and not self.warned:
            self.warned = True
            warn(
                f"a tap is inside a {type(module).__name__}, whose fast path calls no modules: the slower path is"
                " used until the tap is removed, and results agree to the tolerance of the dtype"
            )


def _unfused(attention: nn.MultiheadAttention) -> Callable[..., Any]:
    """The forward of `attention`: torch's own, but that it calls ``out_proj`` instead of using its weight.

    There torch has all positions of all samples in one row after the other; the module is given them in the
    shape of the query, as any other attention would.
    """
    asked = threading.local()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if weight is not attention.out_proj.weight:
            return F.linear(x, weight, bias)
        if len(asked.shape) == 2:
            return attention.out_proj(x)
        first, second = asked.shape[:2]
        if not attention.batch_first:
            return attention.out_proj(x.view(first, second, -1)).flatten(0, 1)
        return attention.out_proj(x.view(second, first, -1).transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    inner = _rebound(F.multi_head_attention_forward, linear=linear)
    inner.__globals__[inner.__name__] = inner  # what torch hands to a TorchFunctionMode, to be called by it
    functional = SimpleNamespace(**{**vars(F), "multi_head_attention_forward": inner})
    forward = _rebound(nn.MultiheadAttention.forward, F=functional, torch=_Torch())

    def run(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.shape = query.shape
        return forward(attention, query, *args, **kwargs)

    return run


class _Torch:
    """torch, but that it says that there is no fast path."""

    backends = SimpleNamespace(mha=SimpleNamespace(get_fastpath_enabled=lambda: False))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _rebound(function: Any, **names: Any) -> Any:
    """`function` with some of the global names that it uses patchg for something else."""
    module = activation if function is nn.MultiheadAttention.forward else F
    known = {name: thing for name, thing in vars(module).items() if name != "__name__"}  # or a compiler looks there
    twin = FunctionType(function.__code__, {**known, **names}, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
