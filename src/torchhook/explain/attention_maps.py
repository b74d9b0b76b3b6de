"""What `explain.attention` gives back: for each attention its weights, and in numbers what its heads look at.

The numbers are taken of some queries at a time, so that no more logits are ever held than `CHUNK`. Of what the weights
are made of, copies are kept, which are far smaller than the weights; those are computed when they are read.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import nan, prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor, nn

from torchhook.core.attention import Logits
from torchhook.core.errors import BudgetError, NotRecordedError
from torchhook.core.selection import glob
from torchhook.core.text import html_table, in_units, table
from torchhook.stats.attention import entropy_of, weights_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHUNK = 2**24  # logits at a time
Grid = tuple[int, int]
Fusion = Literal["mean", "max", "min"]
_FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda weights: weights.mean(1),
    "max": lambda weights: weights.amax(1),
    "min": lambda weights: weights.amin(1),
}


class Focus(NamedTuple):
    """What the heads of one attention look at; NaN for queries that have no choice, see `AttentionCall`."""

    entropy: Tensor
    distance: Tensor
    received: Tensor
    sink: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class AttentionCall:
    """One attention: where it happened, what its heads look at, and its weights.

    Left out of the numbers, and NaN, are queries that see one key or none, who have no choice, and those of padding: in
    self-attention a position that nobody may look at.

    Args:
        path: Of the module in which it happened.
        call: Which of the attentions there, from 0, of so many `calls`.
        shape: Samples × heads × queries × keys.
        added: How many of the keys, at the end, are of no position, as a bias or a sink that is learnt.
        entropy: Samples × heads × queries. Divided by the logarithm of the number of keys that the query sees: 1 is an
            even look at all of them, 0 a look at one.
        distance: Samples × heads × queries. How far away the keys are that are looked at, in the mean; in positions, or
            in patches of a grid. NaN in cross-attention, whose keys are of another sequence.
        received: Samples × heads × keys. The weight that a key gets from the queries, in the mean.
        sink: Samples × heads. That of the first key which is not padding.
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
    asked: bool  # whether its weights were
    max_bytes: int

    @property
    def weights(self) -> Tensor:
        """Samples × heads × queries × keys, computed now; before any dropout. A query that sees no key has zeros."""
        size = prod(self.shape) * self.entropy.element_size()
        if self.source is not None and size > self.max_bytes:
            raise BudgetError(
                f"the weights of {self._name()} take {in_units(size)}, more than max_bytes={self.max_bytes}; read some"
                " queries of them, as .rows(0, 100), or pass a larger max_bytes"
            )
        return torch.cat([self.rows(*ends) for ends in chunks(self.shape)], 2)

    def rows(self, first: int, last: int) -> Tensor:
        """The weights of some queries."""
        if self.source is None and self.asked:
            raise BudgetError(
                f"the weights of {self._name()} were not kept: those before filled max_bytes={self.max_bytes}; name the"
                f" layers that you need, as maps=[{self.path!r}], or pass a larger max_bytes"
            )
        if self.source is None:
            raise NotRecordedError(f"the weights of {self._name()} were not asked for; name it in maps=")
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
        return f"attention of {self._name()}: {shape_of_all(self.shape)}, {_told(self)}"

    def _name(self) -> str:
        which = f" (call {self.call} of {self.calls})" if self.calls > 1 else ""
        return f"{self.path or 'the model'!r}{which}"


class Attended(Sequence[AttentionCall]):
    """Every attention of one pass, in the order in which they were computed, and what the model said (`output`).

    ``seen[3]`` is the fourth; ``seen["encoder.layer.0.attention.self"]`` a list of all at a place, which may be a glob;
    ``seen["encoder.layer.0.attention.self", 0]`` one of them.
    """

    def __init__(self, calls: list[AttentionCall], output: Any, branched: bool = False) -> None:
        self.calls = calls
        self.output = output
        self._branched = branched  # an encoder and a decoder

    @property
    def paths(self) -> list[str]:
        """Where attention happened, in the order of the first time."""
        return list(dict.fromkeys(call.path for call in self.calls))

    def table(self) -> list[dict[str, Any]]:
        """A row for each head of each attention, as plain dictionaries, for pandas and the like."""
        rows = []
        for call in self.calls:
            means = {name: value.tolist() for name, value in call.by_head().items()}
            for head in range(call.shape[1]):
                numbers = {name: values[head] for name, values in means.items()}
                rows.append({"layer": call.path, "call": call.call, "head": head, **numbers})
        return rows

    def rollout(self, calls: Sequence[AttentionCall] | None = None, *, heads: Fusion = "mean") -> Tensor:
        """How much of each input position is in each position at the end: samples × positions × positions.

        After Abnar and Zuidema (2020): the heads are made one, half of what a layer gives is what it was given, and the
        layers are multiplied. Rows sum to 1: what keys of no position get is left out.

        Args:
            calls: The attentions that follow one another; None takes all.
            heads: How several become one: their ``"mean"``, ``"max"`` or ``"min"``.
        """
        if heads not in _FUSIONS:
            raise ValueError(f"heads must be 'mean', 'max' or 'min', not {heads!r}")
        chain = self._chain(calls)
        samples, _, positions, _ = chain[0].shape
        size = 3 * chain[0].entropy.element_size() * samples * positions**2  # what was, one layer, and what is
        if size > chain[0].max_bytes:
            raise BudgetError(f"the rollout takes {in_units(size)}, more than max_bytes={chain[0].max_bytes}")
        whole = torch.eye(positions, device=chain[0].entropy.device, dtype=chain[0].entropy.dtype)
        for call in chain:
            whole = _step(call, _FUSIONS[heads]) @ whole
        return whole

    def figure(self, *, ax: Axes | None = None) -> Figure:
        """The entropy of every head, layer by layer, as colours; needs matplotlib."""
        from torchhook.plot import similarity

        means = [call.by_head()["entropy"].tolist() for call in self.calls]
        widest = max(map(len, means))
        matrix = [mean + [nan] * (widest - len(mean)) for mean in means]
        return similarity(matrix, rows=[f"{call.path} {call.call}" for call in self.calls], ax=ax)

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
        """All at a place, or at those that match a glob."""
        found = [call for call in self.calls if call.path == path] or _matching(self.calls, path)
        if not found:
            raise NotRecordedError(f"no attention was seen at {path!r}; it was at {', '.join(map(repr, self.paths))}")
        return found

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(_HEADER, self._cells())}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._title())}</p>{html_table(_HEADER, self._cells())}"

    def _title(self) -> str:
        return f"{len(self)} attentions at {len(self.paths)} places; entropy, distance and sink are means over heads"

    def _cells(self) -> list[list[Any]]:
        return [[call.path or "''", call.call, shape_of_all(call.shape), *_means(call)] for call in self.calls]

    def _chain(self, calls: Sequence[AttentionCall] | None) -> Sequence[AttentionCall]:
        """The attentions of a rollout, which must be able to follow one another."""
        if calls is None and self._branched:
            raise ValueError(
                "the model has an encoder and a decoder, whose attentions do not follow one another; pass calls= those"
                " that do, as seen['encoder.**']"
            )
        chain = self.calls if calls is None else calls
        if not chain:
            raise ValueError("calls is empty: pass the attentions that follow one another, or None for all")
        samples, _, positions, _ = chain[0].shape
        for call in chain:
            of_sample, _, queries, keys = call.shape
            if (of_sample, queries, keys - call.added) != (samples, positions, positions):
                raise ValueError(
                    f"the attention at {call.path!r} is {shape_of_all(call.shape)}, and cannot be multiplied with that"
                    f" at {chain[0].path!r}, {shape_of_all(chain[0].shape)}: a rollout needs as many keys as queries,"
                    " and as many in each; pass calls= those that follow one another"
                )
        return chain


_HEADER = ("layer", "call", "shape", "entropy", "distance", "sink")


def focus_of(logits: Logits, grid: Grid | None = None) -> Focus:
    """What the heads look at, computed of some queries at a time.

    >>> from torchhook.core.attention import Given
    >>> found = focus_of(Given(torch.zeros(1, 1, 2, 2)))
    >>> found.entropy, found.distance, found.sink
    (tensor([[[1., 1.]]]), tensor([[[0.5000, 0.5000]]]), tensor([[0.5000]]))
    """
    samples, heads, queries, keys = logits.shape
    looked_at = _looked_at(logits)
    is_self = queries == keys - logits.added
    padding = ~looked_at[:, None, :queries] if is_self else looked_at.new_zeros(samples, 1, queries)
    places = _places(logits, grid).to(looked_at.device) if is_self else None
    parts = [_part(logits, *ends, padding, places) for ends in chunks(logits.shape)]
    entropy, distance = torch.cat([part.entropy for part in parts], 2), torch.cat([part.distance for part in parts], 2)
    received = sum(part.received for part in parts) / (~entropy.isnan()).sum(-1)[..., None]  # NaN for nobody
    first_key = looked_at.int().argmax(-1).view(-1, 1, 1).expand(samples, heads, 1)
    return Focus(entropy, distance, received, received.gather(-1, first_key)[..., 0])


class _Part(NamedTuple):
    """Of some queries."""

    entropy: Tensor
    distance: Tensor
    received: Tensor


def _part(logits: Logits, first: int, last: int, padding: Tensor, places: Tensor | None) -> _Part:
    weights, seen = _weights(logits, first, last)
    left_out = (seen < 2) | padding[..., first:last]
    entropy = entropy_of(weights, seen).masked_fill(left_out, nan)
    distance = _distances(weights, places, first, last).masked_fill(left_out, nan)
    return _Part(entropy, distance, weights.masked_fill(left_out[..., None], 0.0).sum(2))


def chunks(shape: tuple[int, int, int, int]) -> Iterator[tuple[int, int]]:
    """First and last of the queries to look at together.

    >>> list(chunks((1, 1, 5, CHUNK // 2)))
    [(0, 2), (2, 4), (4, 5)]
    """
    samples, heads, queries, keys = shape
    step = max(1, CHUNK // max(1, samples * heads * keys))
    return ((first, min(first + step, queries)) for first in range(0, queries, step))


def shape_of_all(shape: Sequence[int]) -> str:
    """A shape as people read it."""
    return "×".join(map(str, shape))


def _weights(logits: Logits, first: int, last: int) -> tuple[Tensor, Tensor]:
    """The weights of some queries, and how many keys each of these sees."""
    rows, seen = logits.rows(first, last), logits.seen(first, last)
    count = seen.sum(-1).expand(rows.shape[:-1])
    return weights_of(rows, seen).masked_fill(count[..., None] == 0, 0.0), count


def _looked_at(logits: Logits) -> Tensor:
    """Which keys of which samples anybody may look at."""
    samples, _, _, keys = logits.shape
    found: Any = False
    for first, last in chunks(logits.shape):
        seen = logits.seen(first, last)
        while seen.dim() < 4:
            seen = seen[None]
        found = found | seen.any(2).any(1)
    return torch.as_tensor(found).expand(samples, keys)


def _places(logits: Logits, grid: Grid | None) -> Tensor:
    """Where the keys are, in a row or in a grid after others that have no place: NaN for those."""
    _, _, queries, keys = logits.shape
    if grid is None:
        known = torch.arange(queries).float()[:, None]
    else:
        known = torch.cartesian_prod(*(torch.arange(side).float() for side in grid)).view(-1, 2)
    before = queries - len(known)
    if before < 0:  # a grid that this attention does not have
        known, before = known[:0], queries
    return nn.functional.pad(known, (0, 0, before, keys - queries), value=nan)


def _distances(weights: Tensor, places: Tensor | None, first: int, last: int) -> Tensor:
    """The mean distance of what some queries look at, of the keys that have a place."""
    if places is None:
        return weights.new_full(weights.shape[:-1], nan)
    placed = ~places[:, 0].isnan()
    gaps = (places[first:last, None] - places[None, placed]).square().sum(-1).sqrt().to(weights.dtype)
    share = weights[..., placed]
    return (share * gaps).sum(-1) / share.sum(-1)


def _step(call: AttentionCall, fuse: Callable[[Tensor], Tensor]) -> Tensor:
    """One layer of a rollout: what every position gets from each, half of it from itself."""
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


def _told(call: AttentionCall) -> str:
    return ", ".join(f"{name} {mean}" for name, mean in zip(("entropy", "distance", "sink"), _means(call), strict=True))
