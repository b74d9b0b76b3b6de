"""Whether the channels that were cut are the right ones.

The model that was cut must give what the whole one does if nothing is made of the channels that went. So in a copy of
that the weights for them are zero. Both have to agree, and what the channels are in the copy must not matter. That
fails where channels are put in another order on their way, and Torch-Pruning did not see it; but also where they are
mixed, as a layer norm does, for that is another one with fewer of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from torchhook.core.batch import Batch, call
from torchhook.core.model_state import evaluating
from torchhook.core.selection import Selector
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import DispatchMode
from torchhook.core.trees import leaves
from torchhook.edits import ablate
from torchhook.prune.dependencies import Graph, copied
from torchhook.prune.planner import Plan

_MIXING = {"native_layer_norm", "native_group_norm", "_fused_rms_norm"}
_REDUCING = {"_softmax", "_log_softmax", "logsumexp", "mean", "sum", "amax", "amin", "max", "min", "argmax", "prod"} | {
    *("var", "var_mean", "std", "norm", "linalg_vector_norm", "cumsum", "sort", "topk"),
}


def verified(model: nn.Module, cut: nn.Module, plan: Plan, batch: Batch) -> str:
    """Raise if the wrong channels of `model` were cut; why that cannot be told, if so, else nothing.

    >>> from torchhook.prune.dependencies import Graph
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1))
    >>> x, plan = torch.rand(4, 2), Plan({"0": (1,)}, {"0": 3}, {"0": (1,)}, (1, 1), {}, None, None)
    >>> cut = copied(model)
    >>> Graph(cut, Batch.of(x)).cut("0", (1,))
    >>> verified(model, cut, plan, Batch.of(x))
    ''
    """
    silent = copied(model)
    graph = Graph(silent, batch)
    for root, channels in plan.cuts.items():
        graph.silence(root, channels)
    expected = _output(silent, batch)
    if not all(leaf.isfinite().all() for leaf in expected):
        return "what the model gives is not finite"
    muted = _output(silent, batch, plan.channels)
    if _agree(expected, muted) and _agree(expected, _output(cut, batch)):
        return ""
    mixed = _mixed(model, batch)
    if mixed:
        return f"there is {mixed} in the model, which is not the same with fewer channels"
    each = {path: _output(silent, batch, {path: channels}) for path, channels in plan.channels.items()}
    wrong = [repr(path) for path, found in each.items() if not _agree(expected, found)]
    raise ValueError(
        f"the model would be cut wrongly: what {', '.join(wrong) or 'a layer'} gives comes in another order to what"
        " it is for, as flip, roll, pixel_shuffle, or permute before flatten make it, and Torch-Pruning does not see"
        " that; pass the layer to plan(ignore=)"
    )


def _output(
    model: nn.Module, batch: Batch, without: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[torch.Tensor]:
    """What a model gives, layers without some of their channels."""
    taps = [Tap(Selector.of(path), ablate(channels=list(channels))) for path, channels in without.items()]
    torch.manual_seed(0)  # for models that draw numbers
    with torch.no_grad(), evaluating(model), Session(model, taps, on_silent="ignore"):
        return [leaf for _, leaf in leaves(call(model, batch)) if leaf.is_floating_point()]


def _agree(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether all are the same, but for rounding."""
    for one, other in zip(expected, found, strict=True):
        if one.numel():
            most = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
            if not (one - other).abs().max() <= most:
                return False
    return True


class _Mixing(DispatchMode):
    """Notes what is computed over channels."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no types
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _MIXING or (name in _REDUCING and _over_channels(args)):
            self.found.append(name.strip("_"))
        return func(*args, **(kwargs or {}))


def _over_channels(args: tuple[Any, ...]) -> bool:
    """Whether the dimensions that a function is given may be that of channels: the second, or of few the last."""
    x = args[0]
    said = next((arg for arg in args[1:] if isinstance(arg, (int, list, tuple)) and not isinstance(arg, bool)), None)
    dims = {said} if isinstance(said, int) else set(said or range(x.dim()))
    return bool({dim % max(x.dim(), 1) for dim in dims} & ({1} if x.dim() > 3 else {1, x.dim() - 1}))


def _mixed(model: nn.Module, batch: Batch) -> str:
    with torch.no_grad(), evaluating(model), _Mixing() as mixing:
        call(model, batch)
    return mixing.found[0] if mixing.found else ""
