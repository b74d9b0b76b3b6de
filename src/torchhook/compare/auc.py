"""How well a score separates positive from negative samples, with confidence intervals."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

_SURE = 1.959963984540054  # standard deviations around the mean that hold 95 % of a normal distribution


class Estimate(NamedTuple):
    """A number with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def auc_of(positive: Tensor, negative: Tensor) -> Estimate:
    """The share of pairs in which the positive sample scores higher, ties counting half, with DeLong's interval.

    >>> auc_of(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])).value
    0.875
    >>> str(auc_of(torch.tensor([2.0, 3.0, 1.0]), torch.tensor([1.0, 0.0])))
    '0.917 [0.686, 1.000]'
    """
    _require_numbers(positive, negative)
    above, below = _share_below(negative, positive), 1 - _share_below(positive, negative)
    value = float(above.mean())
    spread = math.sqrt(_error(above) + _error(below))
    return Estimate(value, max(0.0, value - _SURE * spread), min(1.0, value + _SURE * spread))


def true_positives(positive: Tensor, negative: Tensor, rate: float, draws: int, generator: torch.Generator) -> Estimate:
    """The true positive rate at a false positive rate of `rate`, with a bootstrap interval.

    Positives and negatives are resampled separately, `draws` times, each time with a new threshold. The interval is
    approximate: with few negatives above the threshold it covers the true value in less than 95 % of cases.

    >>> draw = torch.Generator().manual_seed(0)
    >>> true_positives(torch.arange(10.0) + 5, torch.arange(10.0), 0.1, 50, draw).value
    0.6
    """
    _require_numbers(positive, negative)
    again = _passing(_redrawn(positive, draws, generator), _redrawn(negative, draws, generator), rate)
    low, high = again.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(_passing(positive[None], negative[None], rate)), low, high)


def _passing(positive: Tensor, negative: Tensor, rate: float) -> Tensor:
    """For each row, the share of positives above the threshold that at most `rate` of the negatives pass."""
    allowed = int(rate * negative.shape[1])
    threshold = negative.sort(1, descending=True).values[:, allowed, None]
    return (positive > threshold).double().mean(1)


def _require_numbers(*scores: Tensor) -> None:
    if any(bool(some.isnan().any()) for some in scores):
        raise ValueError("scores must not be NaN, which cannot be ranked: leave those samples out")


def _redrawn(values: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    return values[torch.randint(len(values), (draws, len(values)), generator=generator)]


def _share_below(values: Tensor, of: Tensor) -> Tensor:
    """For each element of `of`, the share of `values` below it; equal values count half."""
    order = values.sort().values
    both = torch.searchsorted(order, of, right=False) + torch.searchsorted(order, of, right=True)
    return both.double() / (2 * len(values))


def _error(shares: Tensor) -> float:
    """The squared standard error of the mean."""
    return float(shares.var() / len(shares)) if len(shares) > 1 else 0.0
