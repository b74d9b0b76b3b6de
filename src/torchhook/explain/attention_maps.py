"""The result of `explain.attention`: the weights of each attention, and a summary of what its heads look at.

The summary is computed for a few queries at a time, so that at most `CHUNK` logits are in memory. The weights are
computed when they are read, from copies of queries and keys, which are far smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from torchhook.core.attention import Logits
from torchhook.core.errors import BudgetError, NotRecordedError
from torchhook.core.result import Result
from torchhook.core.selection import glob
from torchhook.core.text import in_units
from torchhook.explain.token_grid import Grid
from torchhook.stats.attention import entropy_of, weights_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHUNK = 2**24  # logits at a time
Fusion = Literal["mean", "max", "min"]
_FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(1),
    "max": lambda weights: weights.amax(1),
    "min": lambda weights: weights.amin(1),
}


class HeadSummary(NamedTuple):
    """What the heads of one attention look at; NaN for the queries that `AttentionCall` leaves out."""

    entropy: Tensor
    distance: Tensor
    received: Tensor
    sink: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class AttentionCall:
    """One attention: where it happened, what its heads look at, and its weights.

    The numbers leave out, as NaN, queries that see at most one key, and so have no choice, and those of padding: in
    self-attention, positions that no query may look at.

    Args:
        path: The path of the module that computes it.
        call: Its index among the attentions of this module, from 0.
        calls: The number of attentions of this module.
        shape: Samples × heads × queries × keys.
        added: How many keys at the end belong to no position, such as a bias or a learned sink.
        entropy: Samples × heads × queries. Divided by the logarithm of the number of keys that the query sees: 1 means
            that all of them have equal weight, 0 that one has it all.
        distance: Samples × heads × queries. The mean distance to the keys, by weight, in positions or in patches of a
            grid. NaN in cross-attention, whose keys belong to another sequence.
        received: Samples × heads × keys. The mean weight that a key gets from the queries.
        sink: Samples × heads. The mean weight of the first key that is not padding.
    """

    path: str
    call: int
    calls: int
    shape: tuple[int, int, int, int]
    added: int
    entropy: Tensor
    distance: Tensor
    received: Tensor
    sink: Tensor
    source: Logits | None
    asked: bool  # whether sites= asked for its weights
    max_bytes: int

    @property
    def weights(self) -> Tensor:
        """Samples × heads × queries × keys, before dropout; computed when read. A query that sees no key has zeros."""
        size = prod(self.shape) * self.entropy.element_size()
        if self.source is not None and size > self.max_bytes:
            raise BudgetError(
                f"the weights of {self._name()} take {in_units(size)}, more than max_bytes={self.max_bytes}; read"
                " those of some queries, such as .rows(0, 100), or pass a larger max_bytes"
            )
        return torch.cat([self.rows(*ends) for ends in chunks(self.shape)], 2)

    def rows(self, first: int, last: int) -> Tensor:
        """The weights of the queries from `first` up to `last`."""
        if self.source is None and self.asked:
            raise BudgetError(
                f"the weights of {self._name()} were not kept: earlier ones filled max_bytes={self.max_bytes}; name the"
                f" layers that you need, such as sites=[{self.path!r}], or pass a larger max_bytes"
            )
        if self.source is None:
            raise NotRecordedError(f"the weights of {self._name()} were not kept; name it in sites=")
        return _weights(self.source, first, min(last, self.shape[2]))[0]

    def by_head(self) -> dict[str, Tensor]:
        """The mean of entropy, distance and sink for each head."""
        return {
            "entropy": self.entropy.nanmean((0, 2)),
            "distance": self.distance.nanmean((0, 2)),
            "sink": self.sink.nanmean(0),
        }

    def figure(self, sample: int = 0, tokens: Sequence[object] | None = None, *, ax: Axes | None = None) -> Figure:
        """The weights of one sample, head by head; see `torchhook.plot.attention`."""
        from torchhook.plot import attention

        return attention(self.weights[sample], tokens=tokens, ax=ax)

    def __repr__(self) -> str:
        return f"attention of {self._name()}: {_shape_text(self.shape)}, {_summary_text(self)}"

    def _name(self) -> str:
        which = f" (call {self.call} of {self.calls})" if self.calls > 1 else ""
        return f"{self.path or 'the model'!r}{which}"


class Attended(Result, Sequence[AttentionCall]):
    """Every attention of one pass, in the order of computation, and the output of the model (`output`).

    ``seen[3]`` is the fourth; ``seen["encoder.layer.0.attention.self"]`` lists all at a path, which may be a glob;
    ``seen["encoder.layer.0.attention.self", 0]`` is one of them. `left_out` has the modules named after attention whose
    attention was not seen, or only in part, with the reasons.
    """

    def __init__(
        self,
        calls: list[AttentionCall],
        output: Any,
        branched: bool = False,
        left_out: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.calls = calls
        self.left_out = dict(left_out)
        self.output = output
        self._branched = branched  # whether the model has an encoder and a decoder

    @property
    def paths(self) -> list[str]:
        """The paths of the modules that computed attention, in the order of their first call."""
        return list(dict.fromkeys(call.path for call in self.calls))

    def _records(self) -> list[dict[str, Any]]:
        """One row per head of each attention."""
        rows = []
        for call in self.calls:
            means = {name: value.tolist() for name, value in call.by_head().items()}
            for head in range(call.shape[1]):
                numbers = {name: values[head] for name, values in means.items()}
                rows.append({"path": call.path, "call": call.call, "head": head, **numbers})
        return rows

    def change(self, other: Attended) -> AttentionChange:
        """How the attention of the same model on the same input has changed in `other`, such as later in a training.

        The result has one row per head of each attention: its mean entropy here (`before`) and in `other` (`after`),
        the `change`, and `moved`: the mean share of its weight that each query gives to other keys, from 0 to 1 (the
        total variation distance). That is None where the weights were not kept in both.

        >>> from torchhook.explain import attention
        >>> model, x = torch.nn.MultiheadAttention(4, 1, batch_first=True), torch.randn(1, 3, 4)
        >>> before = attention(model, (x, x, x))
        >>> _ = model.in_proj_weight.data.zero_()  # now all keys get the same weight
        >>> [row] = before.change(attention(model, (x, x, x))).rows
        >>> round(row["after"], 3), row["change"] > 0, 0 < row["moved"] < 1
        (1.0, True, True)
        """
        mine, others = ([(call.path, call.call, call.shape) for call in one.calls] for one in (self, other))
        if mine != others:
            odd = next((pair for pair in zip(mine, others, strict=False) if pair[0] != pair[1]), None)
            said = f"{len(mine)} attentions and {len(others)}" if odd is None else " and ".join(map(_place_text, odd))
            raise ValueError(f"other must be of the same model and of inputs of the same shape, but has {said}")
        return AttentionChange([row for pair in zip(self.calls, other.calls, strict=True) for row in _changes(*pair)])

    def rollout(self, calls: Sequence[AttentionCall] | None = None, *, heads: Fusion = "mean") -> Tensor:
        """How much of each input position reaches each output position: samples × positions × positions.

        After Abnar and Zuidema (2020): the heads are fused into one, averaged with the identity for the residual
        connection, and multiplied over the layers. Rows sum to 1: keys that belong to no position are left out.

        Args:
            calls: The attentions that follow one another; None takes all.
            heads: How to fuse the heads: by ``"mean"``, ``"max"`` or ``"min"``.
        """
        if heads not in _FUSIONS:
            raise ValueError(f"heads must be 'mean', 'max' or 'min', not {heads!r}")
        chain = self._chain(calls)
        samples, _, positions, _ = chain[0].shape
        size = (
            3 * chain[0].entropy.element_size() * samples * positions**2
        )  # one layer, and the product before and after
        if size > chain[0].max_bytes:
            raise BudgetError(f"the rollout takes {in_units(size)}, more than max_bytes={chain[0].max_bytes}")
        whole = torch.eye(positions, device=chain[0].entropy.device, dtype=chain[0].entropy.dtype)
        for call in chain:
            whole = _step(call, _FUSIONS[heads]) @ whole
        return whole

    def figure(self, *, ax: Axes | None = None) -> Figure:
        """The entropy of every head, layer by layer, as a heat map; needs matplotlib."""
        from torchhook.plot import similarity

        means = [call.by_head()["entropy"].tolist() for call in self.calls]
        widest = max(map(len, means))
        matrix = [mean + [nan] * (widest - len(mean)) for mean in means]
        return similarity(matrix, rows=[f"{call.path} {call.call}" for call in self.calls], unit="entropy", ax=ax)

    @overload
    def __getitem__(self, which: int) -> AttentionCall: ...
    @overload
    def __getitem__(self, which: slice | str) -> list[AttentionCall]: ...
    @overload
    def __getitem__(self, which: tuple[str, int]) -> AttentionCall: ...
    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, tuple):
            path, number = which
            return self._at(path)[number]
        return self._at(which) if isinstance(which, str) else self.calls[which]

    def _at(self, path: str) -> list[AttentionCall]:
        """All attentions at a path, or at the paths that match a glob."""
        found = [call for call in self.calls if call.path == path] or _matching(self.calls, path)
        if not found:
            raise NotRecordedError(f"no attention was seen at {path!r}, only at {', '.join(map(repr, self.paths))}")
        return found

    def __len__(self) -> int:
        return len(self.calls)

    def _foot(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for path, reason in self.left_out.items():
            by_reason.setdefault(reason, []).append(path)
        return [
            f"note: not seen at {paths[0]!r}{f' and {len(paths) - 1} more' * (len(paths) > 1)}: {reason}"
            for reason, paths in by_reason.items()
        ]

    def _title(self) -> str:
        return f"{len(self)} attentions in {len(self.paths)} modules; entropy, distance and sink are means over heads"

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        rows = [[call.path or "''", call.call, _shape_text(call.shape), *_means(call)] for call in self.calls]
        return ("layer", "call", "shape", "entropy", "distance", "sink"), rows

    def _chain(self, calls: Sequence[AttentionCall] | None) -> Sequence[AttentionCall]:
        """The attentions of a rollout; raises unless their shapes can be multiplied."""
        if calls is None and self._branched:
            raise ValueError(
                "the model has an encoder and a decoder, whose attentions do not follow one another; pass those that do"
                " as calls=, such as seen['encoder.**']"
            )
        chain = self.calls if calls is None else calls
        if not chain:
            raise ValueError("calls is empty: pass the attentions that follow one another, or None for all")
        samples, _, positions, _ = chain[0].shape
        for call in chain:
            of_sample, _, queries, keys = call.shape
            if (of_sample, queries, keys - call.added) != (samples, positions, positions):
                raise ValueError(
                    f"the attention at {call.path!r} is {_shape_text(call.shape)}, and cannot be multiplied with that"
                    f" at {chain[0].path!r}, {_shape_text(chain[0].shape)}: a rollout needs as many keys as queries,"
                    " and the same number in each; pass attentions that follow one another as calls="
                )
        return chain


class AttentionChange(Result):
    """How the attention of a model has changed from one moment to another: `rows`, one per head of each attention."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def _records(self) -> list[dict[str, Any]]:
        return self.rows

    def _title(self) -> str:
        return f"{len(self.rows)} heads: their mean entropy before and after, and the share of weight that moved"


def summary_of(logits: Logits, grid: Grid | None = None) -> HeadSummary:
    """What the heads look at, computed for a few queries at a time.

    >>> from torchhook.core.attention import Given
    >>> found = summary_of(Given(torch.zeros(1, 1, 2, 2)))
    >>> found.entropy, found.distance, found.sink
    (tensor([[[1., 1.]]]), tensor([[[0.5000, 0.5000]]]), tensor([[0.5000]]))
    """
    samples, heads, queries, keys = logits.shape
    visible = _visible_keys(logits)
    is_self = queries == keys - logits.added
    padding = ~visible[:, None, :queries] if is_self else visible.new_zeros(samples, 1, queries)
    positions = _positions(logits, grid).to(visible.device) if is_self else None
    parts = [_part(logits, *ends, padding, positions) for ends in chunks(logits.shape)]
    entropy, distance = torch.cat([part.entropy for part in parts], 2), torch.cat([part.distance for part in parts], 2)
    received = sum(part.received for part in parts) / (~entropy.isnan()).sum(-1)[..., None]  # NaN if no query counts
    first_key = visible.int().argmax(-1).view(-1, 1, 1).expand(samples, heads, 1)
    return HeadSummary(entropy, distance, received, received.gather(-1, first_key)[..., 0])


class _Part(NamedTuple):
    """The summary of some queries."""

    entropy: Tensor
    distance: Tensor
    received: Tensor


def _part(logits: Logits, first: int, last: int, padding: Tensor, positions: Tensor | None) -> _Part:
    weights, seen = _weights(logits, first, last)
    left_out = (seen < 2) | padding[..., first:last]
    entropy = entropy_of(weights, seen).masked_fill(left_out, nan)
    distance = _distances(weights, positions, first, last).masked_fill(left_out, nan)
    return _Part(entropy, distance, weights.masked_fill(left_out[..., None], 0.0).sum(2))


def chunks(shape: tuple[int, int, int, int]) -> Iterator[tuple[int, int]]:
    """The ranges of queries to compute together.

    >>> list(chunks((1, 1, 5, CHUNK // 2)))
    [(0, 2), (2, 4), (4, 5)]
    """
    samples, heads, queries, keys = shape
    step = max(1, CHUNK // max(1, samples * heads * keys))
    return ((first, min(first + step, queries)) for first in range(0, queries, step))


def _shape_text(shape: Sequence[int]) -> str:
    """A shape in text."""
    return "×".join(map(str, shape))


def _weights(logits: Logits, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The weights of some queries, and how many keys each of them sees."""
    rows, seen = logits.rows(first, last), logits.seen(first, last)
    count = seen.sum(-1).expand(rows.shape[:-1])
    return weights_of(rows, seen).masked_fill(count[..., None] == 0, 0.0), count


def _visible_keys(logits: Logits) -> Tensor:
    """Which keys of each sample some query may look at."""
    samples, _, _, keys = logits.shape
    found: Any = False
    for first, last in chunks(logits.shape):
        seen = logits.seen(first, last)
        while seen.dim() < 4:
            seen = seen[None]
        found = found | seen.any(2).any(1)
    return torch.as_tensor(found).expand(samples, keys)


def _positions(logits: Logits, grid: Grid | None) -> Tensor:
    """The position of each key in the sequence or in the grid; NaN for keys that have none."""
    _, _, queries, keys = logits.shape
    if grid is None:
        known = torch.arange(queries).float()[:, None]
    else:
        known = torch.cartesian_prod(*(torch.arange(side).float() for side in grid)).view(-1, 2)
    before = queries - len(known)
    if before < 0:  # this attention has fewer positions than the grid
        known, before = known[:0], queries
    return nn.functional.pad(known, (0, 0, before, keys - queries), value=nan)


def _distances(weights: Tensor, positions: Tensor | None, first: int, last: int) -> Tensor:
    """The mean distance from some queries to the keys that have a position, by weight."""
    if positions is None:
        return weights.new_full(weights.shape[:-1], nan)
    placed = ~positions[:, 0].isnan()
    gaps = (positions[first:last, None] - positions[None, placed]).square().sum(-1).sqrt().to(weights.dtype)
    share = weights[..., placed]
    return (share * gaps).sum(-1) / share.sum(-1)


def _changes(before: AttentionCall, after: AttentionCall) -> list[dict[str, Any]]:
    """One row per head, from one attention to the same one at another time."""
    entropies = [call.by_head()["entropy"].tolist() for call in (before, after)]
    moved = _moved(before, after)
    return [
        {"path": before.path, "call": before.call, "head": head, "before": old, "after": new, "change": new - old,
         "moved": None if moved is None else moved[head]}
        for head, (old, new) in enumerate(zip(*entropies, strict=True))
    ]  # fmt: skip


def _moved(before: AttentionCall, after: AttentionCall) -> list[float] | None:
    """The total variation distance of the weights of each head; None if they were not kept."""
    if before.source is None or after.source is None:
        return None
    parts = ((after.rows(*ends) - before.rows(*ends)).abs().sum(-1) / 2 for ends in chunks(before.shape))
    distances = torch.cat(list(parts), 2).masked_fill(before.entropy.isnan(), nan)
    found: list[float] = distances.nanmean((0, 2)).tolist()
    return found


def _place_text(place: tuple[str, int, Sequence[int]]) -> str:
    path, call, shape = place
    return f"{_shape_text(shape)} at {path!r}, call {call}"


def _step(call: AttentionCall, fuse: Callable[[Tensor], Tensor]) -> Tensor:
    """One layer of a rollout: how much each position gets from every other, half of it from itself."""
    positions = call.shape[2]
    fused = torch.cat([fuse(call.rows(*ends)[..., :positions]) for ends in chunks(call.shape)], 1)
    mixed = fused + torch.eye(positions, device=fused.device, dtype=fused.dtype)
    return mixed / mixed.sum(-1, keepdim=True)


def _matching(calls: list[AttentionCall], pattern: str) -> list[AttentionCall]:
    test = glob(pattern).test
    return [call for call in calls if test(call.path, nn.Identity(), None)]


def _means(call: AttentionCall) -> list[str]:
    means = {name: float(value.nanmean()) for name, value in call.by_head().items()}
    return ["–" if value != value else f"{value:.3f}" for value in means.values()]


def _summary_text(call: AttentionCall) -> str:
    return ", ".join(f"{name} {mean}" for name, mean in zip(("entropy", "distance", "sink"), _means(call), strict=True))
