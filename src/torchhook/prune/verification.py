"""Check that the right channels were cut.

The output of the cut model must be that of the whole model with zero weights for the removed channels. So a copy of the
whole model gets such weights: both must agree, and the values of these channels in the copy must not matter. That fails
if channels are reordered on their way without Torch-Pruning noticing. It also fails if channels are mixed: a layer
norm, for example, computes something else from fewer channels.
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
    """Raise if the wrong channels of `model` were cut; return why that cannot be verified, or an empty string.

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
        return "the output of the model is not finite"
    muted = _output(silent, batch, plan.channels)
    if _agree(expected, muted) and _agree(expected, _output(cut, batch)):
        return ""
    mixed = _mixed(model, batch)
    if mixed:
        return f"the model uses {mixed}, whose result depends on the number of channels"
    each = {path: _output(silent, batch, {path: channels}) for path, channels in plan.channels.items()}
    wrong = [repr(path) for path, found in each.items() if not _agree(expected, found)]
    raise ValueError(
        f"the model would be cut wrongly: the channels of {', '.join(wrong) or 'a layer'} are in another order when"
        " they are used, as after flip, roll, pixel_shuffle, or permute before flatten, which Torch-Pruning does not"
        " see; pass the layer to plan(ignore=)"
    )


def _output(
    model: nn.Module, batch: Batch, without: Mapping[str, tuple[int, ...]] = MappingProxyType({})
) -> list[torch.Tensor]:
    """The output of a model, with some channels of its layers ablated."""
    taps = [Tap(Selector.of(path), ablate(channels=list(channels))) for path, channels in without.items()]
    torch.manual_seed(0)  # for models that draw random numbers
    with torch.no_grad(), evaluating(model), Session(model, taps, on_silent="ignore"):
        return [leaf for _, leaf in leaves(call(model, batch)) if leaf.is_floating_point()]


def _agree(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether all are equal up to rounding."""
    for one, other in zip(expected, found, strict=True):
        if one.numel():
            most = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
            if not (one - other).abs().max() <= most:
                return False
    return True


class _Mixing(DispatchMode):
    """Notes operations that mix channels."""

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
    """Whether a function may reduce over channels: the second dimension or, of up to three, the last."""
    x = args[0]
    said = next((arg for arg in args[1:] if isinstance(arg, (int, list, tuple)) and not isinstance(arg, bool)), None)
    dims = {said} if isinstance(said, int) else set(said or range(x.dim()))
    return bool({dim % max(x.dim(), 1) for dim in dims} & ({1} if x.dim() > 3 else {1, x.dim() - 1}))


def _mixed(model: nn.Module, batch: Batch) -> str:
    with torch.no_grad(), evaluating(model), _Mixing() as mixing:
        call(model, batch)
    return mixing.found[0] if mixing.found else ""
