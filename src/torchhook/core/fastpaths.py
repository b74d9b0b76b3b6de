"""Detours around torch's fused fast paths, which run modules without calling them.

In eval mode ``nn.TransformerEncoderLayer`` hands its weights to one fused kernel; hooks inside it turn that off by
themselves. ``nn.TransformerEncoder`` packs a padded batch into a nested tensor, on which only that kernel works.
``nn.MultiheadAttention`` never calls its ``out_proj``, on any path. If a tap is inside one of them, the session takes
the detour for as long as it is open.
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


_nested: weakref.WeakKeyDictionary[nn.TransformerEncoder, int] = weakref.WeakKeyDictionary()  # sessions, by encoder


class Detour(ForwardPatch):
    """A forward of ``nn.MultiheadAttention`` that calls all its submodules, or of its ``out_proj``."""


class Detours:
    """The detours of one session."""

    def __init__(self) -> None:
        self.nested: list[nn.TransformerEncoder] = []
        self.unfused: list[ForwardPatch] = []
        self.warned = False

    def take(self, modules: Iterable[nn.Module], targets: AbstractSet[int]) -> None:
        """Take a detour around every fast path among `modules` that has one of `targets` (ids) inside."""
        fused = [module for module in modules if isinstance(module, _FUSED)]
        for module in dict.fromkeys(fused):
            inside = {id(part) for part in module.modules()}
            if not isinstance(module, nn.TransformerEncoderLayer):
                inside.discard(id(module))
            if inside & targets:
                self._take(module, targets)

    def leave(self) -> None:
        """Return to the fast paths."""
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
            if _is_patched(module):
                return  # another library's forward, which calls what it likes
            self.unfused.append(Detour(module, _unfused(module)))
            projection = module.out_proj
            if module.batch_first and type(projection).forward is nn.Linear.forward and not _is_patched(projection):
                self.unfused.append(Detour(projection, _in_order_of_positions(projection)))
        if torch.backends.mha.get_fastpath_enabled() and not module.training and not self.warned:
            self.warned = True
            warn(
                f"a tap is inside a {type(module).__name__}, whose fast path does not call modules; the slower path is"
                " used until the tap is removed, and results agree within the tolerance of the dtype"
            )


def _unfused(attention: nn.MultiheadAttention) -> Callable[..., Any]:
    """torch's own forward of `attention`, except that it calls ``out_proj`` instead of using its weight.

    At that point torch has flattened samples and positions into rows; the module gets them in the shape of the query,
    as in any other attention.
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
    inner.__globals__[inner.__name__] = inner  # torch passes it to a TorchFunctionMode, which calls it
    functional = SimpleNamespace(**{**vars(F), "multi_head_attention_forward": inner})
    forward = _rebound(nn.MultiheadAttention.forward, F=functional, torch=_Torch())

    def run(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        asked.shape = query.shape
        return forward(attention, query, *args, **kwargs)

    return run


def _in_order_of_positions(projection: nn.Linear) -> Callable[[Tensor], Tensor]:
    """The forward of an ``out_proj`` that gets samples × positions × features, but computes as torch does there.

    torch has the rows in order of positions, not of samples. In another order, the sum over the rows that is the
    gradient of the weight is rounded differently.
    """

    def run(x: Tensor) -> Tensor:
        weight, bias = projection.weight, projection.bias
        if x.dim() != 3:
            return F.linear(x, weight, bias)
        rows = F.linear(x.transpose(0, 1).flatten(0, 1), weight, bias)
        return rows.view(x.shape[1], x.shape[0], -1).transpose(0, 1)

    return run


def _is_patched(module: nn.Module) -> bool:
    """Whether something other than a detour has replaced the forward of `module`."""
    return not isinstance(vars(module).get("forward", Detour), (type, Detour))


class _Torch:
    """The module torch, except that it says that fast paths are disabled."""

    backends = SimpleNamespace(mha=SimpleNamespace(get_fastpath_enabled=lambda: False))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _rebound(function: Any, **names: Any) -> Any:
    """`function` with some of its global names replaced."""
    module = activation if function is nn.MultiheadAttention.forward else F
    # Without __name__, by which a compiler would find the original globals.
    known = {name: thing for name, thing in vars(module).items() if name != "__name__"}
    twin = FunctionType(function.__code__, {**known, **names}, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
