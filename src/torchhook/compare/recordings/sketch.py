"""A sketch of a tensor: a few kilobytes that tell how far two tensors are apart, with neither of them at hand.

The values are multiplied by signs and added up: over groups of neighbouring features, and over some of the rows,
several times with other random signs. The signs depend on the sizes alone, so the sketch of a difference is the
difference of the sketches, and its length is about that of the difference itself. Groups keep the order of the
features: the sketch of a part of them, such as one of several projections that were computed at once, is a part of the
sketch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from torchhook.captures.agreement.rounding import TINY, Absent, Gap
from torchhook.core.transfer import sent_together
from torchhook.stats.kernels.plain import FIELDS
from torchhook.stats.moments import Moments

GROUP = 16  # neighbouring features that are added up
_SUMS = 8  # over the rows, each with other signs
_ROWS = 1024  # of a larger tensor, as many are chosen at random
_ENTRIES = 32  # single values that are kept, at random places
_SMALL = 2048  # values: smaller tensors are kept as they are
_SIGNS = (1, 1, -1, 1, 1, 1, -1, -1, 1, 1, 1, -1, 1, -1, 1, -1)
# The sum of the signs is the root of their number, as that of random ones is on average: a difference that is the same
# for all features is seen at its size.
_MOMENTS = 4e-5  # the relative errors of two root mean squares, which kernels compute differently
_NONFINITE = [FIELDS.index(name) for name in ("nan", "posinf", "neginf")]


def is_small(tensor: Tensor) -> bool:
    """Whether a tensor is better kept as it is: it is small, or has few integers, such as token ids."""
    return tensor.numel() <= (_SMALL if tensor.is_floating_point() else 32 * _SMALL)


class Sketch(Absent):
    """What is kept of a tensor.

    Args:
        dim: The dimension of the features.
        sums: Random sums of the values, one row for each set of signs, one column for each group of features.
        moments: The state of `Moments`.
        entries: Single values.

    >>> x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    >>> near, far = sketch_of(x * 1.01), sketch_of(x.flip(0))
    >>> [round(sketch_of(x).gap(other, is_first=True).error, 2) for other in (near, far)]
    [0.01, 1.41]
    """

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, dim: int, sums: Tensor, moments: Tensor, entries: Tensor
    ) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.dim_of_features = dim
        self.sums = sums
        self.moments = moments
        self.entries = entries

    def gap(self, other: Tensor | Absent, is_first: bool) -> Gap:
        """About how far the two tensors are apart; the worst of the kept entries shows where."""
        dim = self.dim_of_features if len(other.shape) == len(self.shape) else len(other.shape) - 1
        theirs = other if isinstance(other, Sketch) else sketch_of(other, dim)  # type: ignore[arg-type]  # there is no other kind
        a, b = (self, theirs) if is_first else (theirs, self)
        x, y = a.sums.double(), b.sums.double()
        scale, other_scale, apart = (_rms(part, a) for part in (x, y, x - y))
        if (a.moments - b.moments)[_NONFINITE].nan_to_num().any():  # what is not known does not differ
            apart = math.inf
        sizes = a.rms, b.rms
        if all(map(math.isfinite, sizes)):  # of all values, while sums may be over some rows
            apart = max(apart, abs(sizes[0] - sizes[1]) - _MOMENTS * max(sizes))
        entries, others = a.entries.double(), b.entries.double()
        far = (entries - others).abs().nan_to_num(nan=0.0)  # what is not finite is counted above
        worst = int((far / (entries.abs().nan_to_num() + scale + TINY)).argmax())
        peak = float(far[worst]) / (abs(float(entries[worst])) + scale + TINY)
        product = scale * other_scale * _size(a)
        return Gap(
            rms=apart,
            scale=scale,
            peak=peak,
            cosine=max(-1.0, min(1.0, float((x * y).sum()) / product)) if product else 1.0,
            worst=_place(worst, a.shape) if far[worst] else (),
            values=(float(entries[worst]), float((others if far[worst] else entries)[worst])),
        )

    @property
    def rms(self) -> float:
        """The root mean square of all finite values; NaN if it is not known."""
        row = dict(zip(FIELDS, self.moments.tolist(), strict=True))
        count = row["count"] - row["nan"] - row["posinf"] - row["neginf"]
        return math.sqrt(row["m2"] / count + row["mean"] ** 2) if count > 0 else math.nan

    def part(self, places: Sequence[slice]) -> Sketch | None:
        """The sketch of some ranges of the features; None if they do not begin and end between groups."""
        size = self.shape[self.dim_of_features]
        ends = [end for place in places for end in (place.start, place.stop)]
        if any(end % GROUP and end != size for end in ends):
            return None
        columns = [self.sums[:, place.start // GROUP : math.ceil(place.stop / GROUP)] for place in places]
        shape = list(self.shape)
        shape[self.dim_of_features] = sum(place.stop - place.start for place in places)
        return Sketch(shape, self.dtype, self.dim_of_features, torch.cat(columns, 1), *self.blank())

    def blank(self) -> tuple[Tensor, Tensor]:
        """Moments and entries that say nothing, for a part or a union."""
        return torch.full_like(self.moments, math.nan), torch.full_like(self.entries, math.nan)

    def parts(self) -> dict[str, Tensor]:
        """What is kept, by name."""
        return {"sums": self.sums, "moments": self.moments, "entries": self.entries}

    @property
    def nbytes(self) -> int:
        """The size of what is kept."""
        return sum(part.nbytes for part in self.parts().values())


def sketch_of(x: Tensor, dim: int | None = None) -> Sketch:
    """The sketch of a tensor, on its device; nothing waits for that.

    `dim` is the dimension of the features: by default the second one of images, else the last one.
    """
    sketch = begun(x, dim)
    sketch.entries = sketch.entries.to(sketch.sums.dtype)
    sketch.moments = Moments().settle(sketch.moments[None])[0]
    return sketch


def begun(x: Tensor, dim: int | None = None) -> Sketch:
    """The sketch of a tensor whose moments are not settled yet, and whose entries have the dtype of the tensor."""
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()).flatten(-2) if x.is_complex() else x
    dim = (1 if x.dim() > 3 else x.dim() - 1) if dim is None else dim
    wide = _wide(x)
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim])
    chosen, signs, directions = _random(len(rows), x.device, wide)
    rows = (rows if chosen is None else rows.index_select(0, chosen)).to(wide)
    rows = rows.nan_to_num(0.0, 0.0, 0.0) if x.is_floating_point() else rows  # what is not finite is counted
    sums = directions @ rows  # of values with few digits, which tf32 leaves exact
    sums = torch.nn.functional.pad(sums, (0, -rows.shape[1] % GROUP)) if rows.shape[1] % GROUP else sums
    state = _no_values(x.device).clone()
    Moments().update(state, x)
    entries = x.reshape(-1).index_select(0, _places(x.numel(), x.device))
    return Sketch(x.shape, x.dtype, dim, sums.view(_SUMS, -1, GROUP) @ signs, state, entries)


def home(sketches: Sequence[Sketch]) -> Callable[[], list[Sketch]]:
    """Settle the moments of sketches that have begun on one device, and start copying all of them to the host at once.

    Returns a function that waits for the copy.
    """
    moments = Moments().settle(torch.stack([sketch.moments for sketch in sketches]))
    parts = [moments, *(part for sketch in sketches for part in (sketch.sums, sketch.entries))]
    arriving = sent_together(parts)

    def arrived() -> list[Sketch]:
        moments, *parts = arriving()
        found = []
        for sketch, row, sums, entries in zip(sketches, moments, parts[::2], parts[1::2], strict=True):
            shape, dim = sketch.shape, sketch.dim_of_features
            found.append(Sketch(shape, sketch.dtype, dim, sums, row, entries.to(sums.dtype)))
        return found

    return arrived


def _wide(x: Tensor) -> torch.dtype:
    """The dtype in which the values of a tensor are added up."""
    return torch.float64 if x.element_size() > 2 and x.device.type != "mps" else torch.float32


@lru_cache(maxsize=16)
def _no_values(device: torch.device) -> Tensor:
    """The moments of no values."""
    return Moments().empty(torch.empty(0, device=device))


@lru_cache(maxsize=64)
def _random(rows: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor | None, Tensor, Tensor]:
    """Which of so many rows are added up, the signs of the features in a group, and those of the rows, for each sum."""
    chosen = _hashed(_ROWS, rows).remainder(rows).sort().values.to(device) if rows > _ROWS else None
    directions = _hashed(_SUMS * min(rows, _ROWS), 0).view(_SUMS, -1) % 2 * 2 - 1
    return chosen, torch.tensor(_SIGNS, dtype=dtype, device=device), directions.to(device, dtype)


@lru_cache(maxsize=256)
def _places(size: int, device: torch.device) -> Tensor:
    """Where single values are kept, in a tensor with so many."""
    return _hashed(_ENTRIES, size).remainder(size).to(device)


def _hashed(count: int, seed: int) -> Tensor:
    """Numbers that look random and are the same on every machine and in every version of torch."""
    x = (torch.arange(count) + seed * 0x1F123BB5) * 0x2545F4914F6CDD1D
    for shift in (29, 32, 30):
        x = (x ^ (x >> shift & 0x7FFFFFFF)) * 0x369DEA0F31A53F85
    return x >> 20 & 0x7FFFFFFFFFF


def _place(number: int, shape: torch.Size) -> tuple[int, ...]:
    flat = _places(shape.numel(), torch.device("cpu"))[number]
    return tuple(int(at) for at in torch.unravel_index(flat, shape))


def _rms(sums: Tensor, sketch: Sketch) -> float:
    """The root mean square of the values that were added up, as far as their sums tell."""
    return float(torch.linalg.vector_norm(sums)) / math.sqrt(_size(sketch))


def _size(sketch: Sketch) -> float:
    """How many products of signs and values the sums have, over all sets of signs."""
    features = sketch.shape[sketch.dim_of_features]
    return _SUMS * features * min(sketch.shape.numel() // max(features, 1), _ROWS)
