"""`Histogram`, whose edges are the same for every step, rank and run, and `Quantiles` computed from it.

The bin of a value is given by its first eleven bits as a float32: sign, exponent, and two bits of the fraction. So
every octave has four bins of equal width, for each sign and at every scale, and finding the bin is one shift.
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
_FINITE = 255 * 4  # bins of one sign, without those of infinity and NaN


class Bins(NamedTuple):
    """How many values are between each edge and the next, over the part of the range that has any."""

    edges: Tensor
    counts: Tensor

    def quantile(self, q: float) -> float:
        """The value below which a fraction `q` of the values is, interpolated inside its bin; NaN without values.

        The exact quantile is in the same bin, so the error is less than a quarter of it. For values spread over several
        octaves it is about a hundredth; for values in only a few bins it is more.
        """
        require_fraction(q)
        if not len(self.counts):
            return math.nan
        below = self.counts.cumsum(0)
        wanted = q * (float(below[-1]) - 1) + 0.5  # each value is in the middle of its share
        number = int(torch.searchsorted(below, wanted))
        before = float(below[number] - self.counts[number])
        inside = (wanted - before) / float(self.counts[number].clamp(min=1))
        low, high = self.edges[number : number + 2].tolist()
        return 0.0 if 0 in (low, high) else float(low + (high - low) * inside)  # zeros, not denormals

    @property
    def entropy(self) -> float:
        """The entropy of the distribution over the bins, in nats; NaN without values.

        It is 0 if all values are in one bin, and the log of the number of bins if each has as many.

        >>> round(Histogram().of(torch.tensor([1.0, 2.0, 4.0, 8.0])).entropy, 4)  # log 4
        1.3863
        """
        share = self.counts[self.counts > 0].double() / self.counts.sum()
        return abs(float(-(share * share.log()).sum())) if len(share) else math.nan  # 0.0, not -0.0

    @property
    def normalised_entropy(self) -> float:
        """The entropy as a fraction of the most that it could be over the bins that have values: 1 if all have as many.

        It is 0 if all values are in one bin, and NaN without values.
        """
        used = int((self.counts > 0).sum())
        return min(self.entropy / math.log(used), 1.0) if used > 1 else self.entropy

    def distance(self, other: Bins) -> float:
        """The Wasserstein distance: how far values have to move, on average, to be distributed like the other ones.

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
        """The fraction of the distribution below each of `values`."""
        below = torch.cat([self.counts.new_zeros(1), self.counts.cumsum(0)]).double() / float(self.counts.sum())
        number = torch.searchsorted(self.edges, values, right=True).clamp(1, len(self.counts))
        low, high = self.edges[number - 1], self.edges[number]
        inside = ((values - low) / (high - low)).clamp(0, 1)
        return below[number - 1] + inside * (below[number] - below[number - 1])


class Binned(Stat):
    """A statistic of the counts in the bins; all of them share one state."""

    width = BINS

    @property
    def key(self) -> str:
        return Histogram.name

    def update(self, state: Tensor, x: Tensor) -> None:
        kernels(x.device).histogram(state, x)


class Histogram(Binned):
    """The exact number of values in each of 2,040 fixed bins, four per octave; NaN and ±Inf are left out.

    Values beyond the range of float32 are in the outermost bins.

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
    """Quantiles from the bins of `Histogram`. Each is in the right bin, so its error is less than a quarter of it.

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
    """Raise unless `q` is in [0, 1]."""
    if not (isinstance(q, (int, float)) and 0 <= q <= 1):
        raise ValueError(f"q must be a number in [0, 1], not {q!r}")


def _edges() -> Tensor:
    above = (torch.arange(_FINITE, dtype=torch.int32, device="cpu") << 21).view(torch.float32).double()
    above = torch.cat([above, above.new_tensor([2.0**128])])
    return torch.cat([-above.flip(0), above[1:]])


_EDGES = _edges()
