"""The kernels in plain torch: correct on every device and for every dtype. The compiled ones are tested against them.

They never read a number from the device, so that they never wait for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIELDS = ("count", "nan", "posinf", "neginf", "zeros", "mean", "abs_sum", "m2", "m3", "m4", "min", "max")
"""The numbers in a row of moments: counts of values, then moments and extremes of the finite ones (`m2` to `m4` are
sums of powers of the distance from the mean)."""

BINS = 2048  # 2¹¹: a bin is given by the first eleven bits of a float
_PIECE = 1 << 22  # values at a time, since each takes about 60 bytes here
_CACHED = 1 << 15  # the same on a CPU, where they should stay in the cache


class Plain:
    """The kernels for devices that have no compiled ones."""

    rows = 1  # of moments in one state

    def moments(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the moments in `state`, a row (or several, the first of which gets them)."""
        row = state.view(-1, len(FIELDS))[0]
        if x.numel():
            pieces = x.reshape(-1).split(_CACHED if x.device.type == "cpu" else _PIECE)
            row.copy_(merged_moments(torch.stack([row, *map(moments_of, pieces)])))

    def settled(self, states: Tensor) -> Tensor:
        """The rows of each state merged into one."""
        return merged_moments(states.movedim(1, 0))

    def histogram(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the bins in `state`."""
        for piece in x.reshape(-1).split(_PIECE):
            state.scatter_add_(0, bins_of(piece), state.new_ones(()).expand(piece.numel()))

    def moments_and_histogram(self, moments: Tensor, bins: Tensor, x: Tensor) -> bool:
        """Add the values in `x` to both states, if that takes only one read of them; says whether it was done."""
        return False

    def channels(self, state: Tensor, x: Tensor, dim: int) -> None:
        """Add the values in `x` to the units in `state`, which are in dimension `dim`."""
        state.copy_(merged_channels(torch.stack([state, channels_of(x.movedim(dim, 0).flatten(1))])))


def empty_moments(device: torch.device, rows: int = 1) -> Tensor:
    """The moments of no values."""
    row = torch.zeros(rows, len(FIELDS), dtype=torch.float64, device=device)
    row[:, -2] = math.inf
    row[:, -1] = -math.inf
    return row[0] if rows == 1 else row


def moments_of(x: Tensor) -> Tensor:
    """The moments of the values in `x`, which must not be empty.

    >>> row = moments_of(torch.tensor([0.0, 1.0, 2.0, math.nan]))
    >>> {name: value for name, value in zip(FIELDS, row.tolist()) if value}
    {'count': 4.0, 'nan': 1.0, 'zeros': 1.0, 'mean': 1.0, 'abs_sum': 3.0, 'm2': 2.0, 'm4': 2.0, 'max': 2.0}
    """
    x = x.double()
    finite = x.isfinite()
    known = x.where(finite, 0.0)
    n = finite.sum()
    mean = known.sum() / n.clamp(min=1)
    mean = mean + (known - mean).where(finite, 0.0).sum() / n.clamp(min=1)  # correct the rounding error
    d = (known - mean).where(finite, 0.0)
    q = d * d
    counts = [n.new_full((), x.numel()), x.isnan().sum(), (x == math.inf).sum(), (x == -math.inf).sum(), (x == 0).sum()]
    powers = [mean, known.abs().sum(), q.sum(), (q * d).sum(), (q * q).sum()]
    extremes = [x.where(finite, math.inf).amin(), x.where(finite, -math.inf).amax()]
    return torch.stack([number.double() for number in (*counts, *powers, *extremes)])


def moments_of_each(values: Tensor) -> Tensor:
    """One row of moments for each of `values`."""
    x = values.double()
    finite = x.isfinite()
    known = x.where(finite, 0.0)
    zeros = torch.zeros_like(x)
    counts = [torch.ones_like(x), x.isnan(), x == math.inf, x == -math.inf, x == 0]
    extremes = [x.where(finite, math.inf), x.where(finite, -math.inf)]
    return torch.stack([part.double() for part in (*counts, known, known.abs(), zeros, zeros, zeros, *extremes)], -1)


def merged_moments(rows: Tensor) -> Tensor:
    """Merge rows of moments along the first dimension into one.

    >>> parts = torch.stack([moments_of(torch.tensor([1.0, 2.0])), moments_of(torch.tensor([6.0]))])
    >>> bool((merged_moments(parts) == moments_of(torch.tensor([1.0, 2.0, 6.0]))).all())
    True
    """
    count, nan, posinf, neginf, zeros, mean, abs_sum, m2, m3, m4, low, high = rows.unbind(-1)
    n = count - nan - posinf - neginf
    total = n.sum(0)
    centre = (n * mean).sum(0) / total.clamp(min=1)
    d = mean - centre
    middle = centre + (n * d).sum(0) / total.clamp(min=1)
    d = torch.where(n > 0, mean - middle, 0.0)
    powers = [
        m2 + n * d**2,
        m3 + 3 * d * m2 + n * d**3,
        m4 + 4 * d * m3 + 6 * d**2 * m2 + n * d**4,
    ]
    counts = [part.sum(0) for part in (count, nan, posinf, neginf, zeros)]
    sums = [middle, abs_sum.sum(0), *(power.sum(0) for power in powers)]
    return torch.stack([*counts, *sums, low.amin(0), high.amax(0)], -1)


def channels_of(x: Tensor) -> Tensor:
    """For each row of `x`: count, mean, m2 and sum of absolutes of the finite values, and how many are above zero.

    >>> channels_of(torch.tensor([[0.0, 4.0, 4.0, 0.0, math.inf]])).flatten().tolist()
    [4.0, 2.0, 16.0, 8.0, 2.0]
    """
    x = x if x.dtype == torch.float64 else x.float()
    finite = x.isfinite()
    known = x.where(finite, 0)
    n = finite.sum(1)
    some, wide = n.clamp(min=1), torch.float64  # in float32, sums of large numbers would overflow
    mean = (known.sum(1, dtype=wide) / some).to(x.dtype)
    d = (x - mean[:, None]).where(finite, 0)
    left = d.sum(1, dtype=wide) / some
    m2 = torch.linalg.vector_norm(d, dim=1, dtype=wide).square() - n * left.square()
    size = torch.linalg.vector_norm(known, 1, dim=1, dtype=wide)
    return torch.stack([n.double(), mean.double() + left, m2.clamp(min=0), size, (known > 0).sum(1).double()])


def merged_channels(states: Tensor) -> Tensor:
    """Merge results of `channels_of` along the first dimension into one."""
    n, mean, m2, size, active = states.unbind(-2)
    total = n.sum(0).clamp(min=1)
    centre = (n * mean).sum(0) / total
    middle = centre + (n * (mean - centre)).sum(0) / total
    m2 = m2 + n * (mean - middle).square()
    return torch.stack([n.sum(0), middle, m2.sum(0), size.sum(0), active.sum(0)], -2)


def bins_of(x: Tensor) -> Tensor:
    """The bin of each value: its first eleven bits as a float32 (sign, exponent, two bits of the fraction).

    >>> bins_of(torch.tensor([0.0, 1.0, 1.25, -1.0])).tolist()
    [0, 508, 509, 1532]
    """
    single = x.float()
    if x.dtype == torch.float64 or not (x.is_floating_point() or x.dtype in _SMALL):
        wide = x.double()  # rounding may have carried a value over an edge: truncate instead
        beyond = (single.double().abs() > wide.abs()) & wide.isfinite()
        single = torch.where(beyond, single.nextafter(torch.zeros_like(single)), single)
    return (single.view(torch.int32) >> 21).long() & (BINS - 1)


_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)
