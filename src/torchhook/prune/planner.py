"""`plan`: choose the channels to remove by their scores."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from torchhook.core.batch import Batch, Loss, call, on_device
from torchhook.core.model_state import evaluating, random_state_kept
from torchhook.core.selection import Query, queries_of, select, unwrapped
from torchhook.core.tabular import Tabular
from torchhook.prune.dependencies import ChannelGroup, Graph, copied, requiring_gradients
from torchhook.prune.layers import channels_of, inputs_of
from torchhook.prune.scores import Importance


@dataclass(frozen=True, eq=False, repr=False)
class Plan(Tabular):
    """Which channels to remove.

    Args:
        channels: For every layer that loses channels, by path: their numbers.
        sizes: How many channels each of these layers has.
        cuts: The same for one layer of each group; the channels of the others go with them.
        flops: FLOPs for one batch, before and after; the latter estimated from convolutions and linear layers.
        left_out: Layers that keep all their channels, and why.
        x, loss: The example batch and the loss of `importance`, for `apply`.

    >>> Plan({"conv": (1, 3)}, {"conv": 8}, {"conv": (1, 3)}, (100, 75), {}, None, None)
    Plan: remove 2 of 8 channels of 1 layer and 25.0 % of the FLOPs
    path  channels  removed
    conv         8        2
    """

    channels: Mapping[str, tuple[int, ...]]
    sizes: Mapping[str, int]
    cuts: Mapping[str, tuple[int, ...]]
    flops: tuple[int, int]
    left_out: Mapping[str, str]
    x: Any
    loss: Loss | None

    def _records(self) -> list[dict[str, Any]]:
        return [
            {"path": path, "channels": self.sizes[path], "removed": len(gone)} for path, gone in self.channels.items()
        ]

    def _title(self) -> str:
        gone, count = sum(map(len, self.channels.values())), len(self.channels)
        before, after = self.flops
        share = 1 - after / before if before else 0.0
        return (
            f"Plan: remove {gone} of {sum(self.sizes.values())} channels of {count} layer{'s' if count != 1 else ''}"
            f" and {100 * share:.1f} % of the FLOPs"
        )


def plan(
    importance: Importance,
    ratio: float | None = None,
    flops: float | None = None,
    *,
    ranking: Literal["global", "layer"] = "global",
    combine: Literal["mean", "sum", "max"] = "mean",
    most: float = 0.9,
    ignore: Query | Iterable[Query] = (),
    x: Any = None,
) -> Plan:
    """Choose the channels with the lowest scores.

    Channels that must go together, like those of layers whose outputs are added, are one choice and count as one. The
    layers that compute the output of the model are never touched.

    Args:
        importance: The scores, from `importance` or your own.
        ratio: The fraction of channels to remove. Or:
        flops: The fraction of FLOPs to save at least.
        ranking: ``"global"`` ranks the channels of all layers together; scores that are not in units of the loss are
            divided by the mean of their layer first. ``"layer"`` removes the same fraction of each layer.
        combine: The score of channels that go together: the mean, sum or maximum of their scores.
        most: The largest fraction of a layer's channels to remove; one always stays.
        ignore: Queries for layers to leave alone, with all layers tied to them.
        x: A batch to trace the model with; by default the first that `importance` saw.

    >>> from torchhook.prune.planner import plan
    >>> from torchhook.prune.scores import importance
    >>> model = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 2))
    >>> found = importance(model, [(torch.rand(8, 4), torch.rand(8, 2))])
    >>> chosen = plan(found, ratio=0.3)
    >>> {path: len(channels) for path, channels in chosen.channels.items()}, chosen.left_out
    ({'0': 3}, {'2': 'it computes the output of the model'})
    """
    _require(importance, ratio, flops, ranking, combine, most)
    example = importance.x if x is None else x
    with torch.inference_mode(False), random_state_kept(importance.model):
        model = copied(unwrapped(importance.model))
        batch = Batch.of(on_device(example, model))
        groups = list(Graph(model, batch).groups())
        cost = Cost(model, batch)
    queries = queries_of(ignore)
    ignored = list(select(importance.model, *queries)) if queries else []
    free, left_out = _free(groups, importance, ignored)
    worth = [_worth(group, importance, combine, ranking) for group in free]
    order = _order(worth, most)
    count = _first(order, worth, ratio) if ratio is not None else _enough(order, free, cost, flops or 0.0)
    gone = _chosen(order[:count], worth)
    return _plan(importance, example, free, gone, cost, left_out)


class Candidate(NamedTuple):
    """One choice of a group that may be removed, with its score."""

    score: float
    group: int
    choice: int


class Cost:
    """The FLOPs of a batch, layer by layer, with and without some channels."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model = model
        self.total, self.layers = flops_of(model, batch)

    def without(self, groups: Sequence[ChannelGroup], gone: Sequence[Tensor]) -> int:
        """The FLOPs without the channels in `gone`, one mask per group."""
        outputs: dict[str, int] = {}
        inputs: dict[str, int] = {}
        for group, mask in zip(groups, gone, strict=True):
            for lost, members in ((outputs, group.outputs), (inputs, group.inputs)):
                for path, index in members.items():
                    lost[path] = lost.get(path, 0) + int(mask[index.choice].sum())
        saved = 0.0
        for path in {*outputs, *inputs}:
            layer = self.model.get_submodule(path)
            share = 1 - outputs.get(path, 0) / channels_of(layer)
            share *= 1 - inputs.get(path, 0) / inputs_of(layer)
            saved += self.layers.get(path, 0) * (1 - share)
        return round(self.total - saved)


def flops_of(model: nn.Module, batch: Batch) -> tuple[int, dict[str, int]]:
    """The FLOPs of a forward as torch counts them: the total, and by module."""
    # torch's counter hooks every input that requires a gradient, and fails at a view of a parameter without a graph
    with (
        torch.no_grad(),
        evaluating(model),
        requiring_gradients(model, False),
        FlopCounterMode(display=False) as counter,
    ):
        call(model, batch)
    named = {name.partition(".")[2]: sum(count.values()) for name, count in counter.get_flop_counts().items()}
    return counter.get_total_flops(), named


def _free(
    groups: list[ChannelGroup], importance: Importance, ignored: list[str]
) -> tuple[list[ChannelGroup], dict[str, str]]:
    """The groups that may lose channels, and why the other layers may not."""
    free: list[ChannelGroup] = []
    left_out: dict[str, str] = {}
    for group in groups:
        stays = [path for path in group.outputs if any(path == other or _is_in(path, other) for other in ignored)]
        reason = group.fixed or (f"{stays[0]!r} is in ignore" if stays else "")
        if not reason and not any(path in importance for path in group.outputs):
            reason = importance.left_out.get(group.root, "there are no scores for it")
        if not reason and group.choices < 2:
            reason = "it has only one channel, or all its channels must go together"
        if reason:
            left_out |= dict.fromkeys(group.outputs, reason)
        else:
            free.append(group)
    seen = {path for group in groups for path in group.outputs}
    left_out |= {path: "Torch-Pruning does not see it" for path in importance if path not in seen}
    if not free:
        reasons = "; ".join(f"{path!r}: {why}" for path, why in left_out.items())
        raise ValueError(f"no layer of the model can lose channels: {reasons or 'its graph has no layers'}")
    return free, left_out


def _worth(group: ChannelGroup, importance: Importance, combine: str, ranking: str) -> Tensor:
    """The score of each choice of a group."""
    scored = [(path, importance[path].double(), index) for path, index in group.outputs.items() if path in importance]
    start = -torch.inf if combine == "max" else 0.0
    worth = torch.full((group.choices,), start, dtype=torch.float64)
    counts = torch.zeros(group.choices, dtype=torch.float64)
    for path, scores, (own, choice) in scored:
        if len(scores) <= int(own.max()):
            raise ValueError(f"importance has {len(scores)} scores for {path!r}, but the layer has more channels")
        worth.scatter_reduce_(0, choice, scores.cpu()[own], "amax" if combine == "max" else "sum")
        counts.scatter_add_(0, choice, torch.ones(len(own), dtype=torch.float64))
    if combine == "mean":
        worth /= counts.clamp(min=1)
    if ranking == "layer":
        return worth.argsort(stable=True).argsort().double() / group.choices
    return worth if importance.comparable else worth / worth.mean().clamp(min=torch.finfo(torch.float64).tiny)


def _order(worth: list[Tensor], most: float) -> list[Candidate]:
    """All choices that may go, the lowest score first."""
    units = []
    for number, scores in enumerate(worth):
        allowed = min(int(most * len(scores)), len(scores) - 1)
        least = scores.argsort(stable=True)[:allowed]
        units += [Candidate(float(scores[choice]), number, int(choice)) for choice in least]
    return sorted(units)


def _first(order: list[Candidate], worth: list[Tensor], ratio: float) -> int:
    total = sum(map(len, worth))
    count = round(ratio * total)
    if count > len(order):
        raise ValueError(
            f"ratio={ratio} means {count} of {total} channels, but most= allows {len(order)}; pass a larger most="
        )
    return count


def _enough(order: list[Candidate], groups: list[ChannelGroup], cost: Cost, flops: float) -> int:
    """How many choices must go to save that fraction of the FLOPs."""
    widths = [group.choices for group in groups]

    def saved(count: int) -> float:
        return 1 - cost.without(groups, _masks(order[:count], widths)) / max(cost.total, 1)

    reachable = saved(len(order))
    if reachable < flops:
        raise ValueError(f"flops={flops} cannot be reached: at most {reachable:.3f} can be saved; pass a larger most=")
    return bisect_left(range(len(order)), flops, key=saved)


def _chosen(units: list[Candidate], worth: list[Tensor]) -> list[Tensor]:
    return _masks(units, [len(scores) for scores in worth])


def _masks(units: list[Candidate], widths: list[int]) -> list[Tensor]:
    masks = [torch.zeros(width, dtype=torch.bool) for width in widths]
    for unit in units:
        masks[unit.group][unit.choice] = True
    return masks


def _plan(
    importance: Importance, x: Any, groups: list[ChannelGroup], gone: list[Tensor], cost: Cost, left_out: dict[str, str]
) -> Plan:
    channels: dict[str, tuple[int, ...]] = {}
    cuts: dict[str, tuple[int, ...]] = {}
    for group, mask in zip(groups, gone, strict=True):
        if mask.any():
            for path, (own, choice) in group.outputs.items():
                gone_here = own[mask[choice]].tolist()
                channels[path] = (*channels.get(path, ()), *gone_here)
                if path == group.root:
                    cuts[path] = tuple(sorted(gone_here))
    rank = {path: number for number, path in enumerate(importance)}
    ordered = sorted(channels, key=lambda path: rank.get(path, len(rank)))
    return Plan(
        channels={path: tuple(sorted(channels[path])) for path in ordered},
        sizes={path: channels_of(cost.model.get_submodule(path)) for path in ordered},
        cuts=cuts,
        flops=(cost.total, cost.without(groups, gone)),
        left_out={path: left_out[path] for path in sorted(left_out, key=lambda path: rank.get(path, len(rank)))},
        x=x,
        loss=importance.loss,
    )


def _is_in(path: str, above: str) -> bool:
    return path.startswith(f"{above}.") or not above


def _require(importance: Any, ratio: Any, flops: Any, ranking: Any, combine: Any, most: Any) -> None:
    if not isinstance(importance, Importance):
        raise TypeError(f"importance must be a result of prune.importance, not {importance!r:.80}")
    if (ratio is None) == (flops is None):
        raise ValueError("pass either ratio= or flops=: the fraction of channels to remove or of FLOPs to save")
    for name, value in (("ratio", ratio), ("flops", flops), ("most", most)):
        if value is not None and not (isinstance(value, (int, float)) and 0 <= value < 1 + (name == "most")):
            raise ValueError(f"{name} must be a fraction from 0 to less than 1, not {value!r}")
    if ranking not in ("global", "layer"):
        raise ValueError(f"ranking must be 'global' or 'layer', not {ranking!r}")
    if combine not in ("mean", "sum", "max"):
        raise ValueError(f"combine must be 'mean', 'sum' or 'max', not {combine!r}")


_HEADER = ("layer", "channels", "removed")
