"""Histograms whose edges are the same for every step, rank and run, and quantiles from them.

The bin of a value is the first eleven bits of it as a float32: sign, exponent, and two bits of the fraction. So an
octave has four bins of equal width, for each sign and at every scale, and which bin it is costs a shift.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.plain import BINS
from torchhook.stats.stat import Stat

_HALF = BINS // 2
_FINITE = 255 * 4  # bins of one sign whose exponent is not that of infinities


class Bins(NamedTuple):
    """How many values lie between each edge and the next; only the part of the range in which there are some."""

    edges: Tensor
    counts: Tensor

    def quantile(self, q: float) -> float:
        """The value below which a fraction `q` lies, interpolated inside its bin; NaN if there are no values.

        The true one lies in the same bin, so this one is off by less than a quarter of it. Of values spread over
        several octaves it is off by about a hundredth; of values that all lie in a few bins, by more.
        """
        require_fraction(q)
        if not len(self.counts):
            return math.nan
        below = self.counts.cumsum(0)
        wanted = q * (float(below[-1]) - 1) + 0.5  # each value in the middle of its share
        number = int(torch.searchsorted(below, wanted))
        before = float(below[number] - self.counts[number])
        inside = (wanted - before) / float(self.counts[number].clamp(min=1))
        low, high = self.edges[number : number + 2].tolist()
        return 0.0 if 0 in (low, high) else float(low + (high - low) * inside)  # zeros are far more than denormals

    def distance(self, other: Bins) -> float:
        """The Wasserstein distance: how far values have to be moved, on average, to be distributed as the other's.

        >>> a, b = Histogram().of(torch.linspace(1, 2, 1000)), Histogram().of(torch.linspace(2, 3, 1000))
        >>> round(a.distance(b), 1)
        1.0
        """
        if not (len(self.counts) and len(other.counts)):
            return math.nan
        edges = torch.cat([self.edges, other.edges]).unique()
        gap = (self._below(edges) - other._below(edges)).abs()
        return float(((gap[1:] + gap[:-1]) / 2 * edges.diff()).sum())

    def _below(self, values: Tensor) -> Tensor:
        """Which part lies below each of some values."""
        below = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)]).double() / float(self.counts.sum())
        number = torch.searchsorted(self.edges, values, right=True).clamp(1, len(self.counts))
        low, high = self.edges[number - 1], self.edges[number]
        inside = ((values - low) / (high - low)).clamp(0, 1)
        return below[number - 1] + inside * (below[number] - below[number - 1])


class Binned(Stat):
    """A statistic of the counts in the bins: all such share one state."""

    width = BINS

    @property
    def key(self) -> str:
        return Histogram.name

    def update(self, state: Tensor, x: Tensor) -> None:
        kernels(x.device).histogram(state, x)


class Histogram(Binned):
    """How many values lie in each of 2,040 fixed bins, four an octave; NaN and ±Inf are left out. Exact.

    What is beyond the range of float32 is in the outermost bins.

    >>> bins = Histogram().of(torch.tensor([1.0, 1.1, 1.3]))
    >>> bins.edges.tolist(), bins.counts.tolist()
    ([1.0, 1.25, 1.5], [2, 1])
    """

    name = "histogram"

    def compute(self, state: Tensor) -> Bins:
        counts = torch.cat([state[_HALF : _HALF + _FINITE].flip(0), state[:_FINITE]])
        some = counts.nonzero()
        if not len(some):
            return Bins(_EDGES[:1], counts[:0].long())
        first, last = int(some[0]), int(some[-1])
        return Bins(_EDGES[first : last + 2], counts[first : last + 1].long())


class Quantiles(Binned):
    """Quantiles from the bins of `Histogram`: each lies in the right bin, so it is off by less than a quarter at most.

    >>> {q: round(value, 1) for q, value in Quantiles(0.25, 0.5).of(torch.linspace(0, 8, 1001)).items()}
    {0.25: 2.0, 0.5: 4.0}
    """

    name = "quantiles"

    def __init__(self, *q: float) -> None:
        for one in q:
            require_fraction(one)
        self.q = q or (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)

    def compute(self, state: Tensor) -> dict[float, float]:
        bins = Histogram().compute(state)
        return {q: bins.quantile(q) for q in self.q}


def require_fraction(q: float) -> None:
    """Raise unless `q` lies in [0, 1]."""
    if not (isinstance(q, (int, float)) and 0 <= q <= 1):
        raise ValueError(f"q must be a number in [0, 1], not {q!r}")


def _edges() -> Tensor:
    above = (torch.arange(_FINITE, dtype=torch.int32, device="cpu") << 21).view(torch.float32).double()
    above = torch.cat([above, above.new_tensor([2.0**128])])
    return torch.cat([-above.flip(0), above[1:]])


_EDGES = _edges()
