"""`Moments`: counts, moments and extremes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from torchhook.stats.histogram import Binned
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.plain import FIELDS, empty_moments, merged_moments
from torchhook.stats.stat import Stat


@dataclass(frozen=True)
class Summary:
    """What `Moments` computes. All but the counts are of the finite values, and NaN if there are none."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    l2: float
    abs_mean: float
    zero_fraction: float
    nonfinite: int
    nan: int
    posinf: int
    neginf: int
    skewness: float
    kurtosis: float


class Moments(Stat):
    """Count, mean, standard deviation (unbiased, as torch's), minimum, maximum, zeros, NaN, ±Inf, skewness, kurtosis.

    Counts and extremes are exact. Compared with float64, the error of the mean is below 1e-5 standard deviations, that
    of the standard deviation and the mean absolute value below 1e-5 of themselves, and that of the third and fourth
    moments below 1e-4 of the mean absolute powers. This holds for any mean, and however the values are split.

    >>> import torch
    >>> summary = Moments().of(torch.tensor([0.0, 1.0, 2.0, 3.0, float("nan")]))
    >>> summary.count, summary.nonfinite, summary.mean, summary.max, summary.zero_fraction
    (5, 1, 1.5, 3.0, 0.2)
    """

    name = "moments"
    additive = False

    def empty(self, x: Tensor) -> Tensor:
        return empty_moments(x.device, kernels(x.device).rows)

    def update(self, state: Tensor, x: Tensor) -> None:
        kernels(x.device).moments(state, x)

    def together(self, state: Tensor, other: Stat, its: Tensor) -> Callable[[Tensor], bool] | None:
        if type(self).update is not Moments.update or type(other).update is not Binned.update:
            return None
        return partial(kernels(state.device).moments_and_histogram, state, its)

    def merge(self, states: Tensor) -> Tensor:
        return merged_moments(states)

    def settle(self, states: Tensor) -> Tensor:
        return kernels(states.device).settled(states) if states.dim() == 3 else states

    def compute(self, state: Tensor) -> Summary:
        row = dict(zip(FIELDS, state.tolist(), strict=True))
        count, nonfinite = row["count"], row["nan"] + row["posinf"] + row["neginf"]
        n = count - nonfinite
        some = n > 0
        variance = row["m2"] / n if some else math.nan
        square = variance * variance  # not **, which raises on overflow
        return Summary(
            count=int(count),
            mean=row["mean"] if some else math.nan,
            std=math.sqrt(row["m2"] / (n - 1)) if n > 1 else math.nan,
            min=row["min"] if some else math.nan,
            max=row["max"] if some else math.nan,
            l2=math.sqrt(row["m2"] + n * row["mean"] * row["mean"]) if some else math.nan,
            abs_mean=row["abs_sum"] / n if some else math.nan,
            zero_fraction=row["zeros"] / count if count else math.nan,
            nonfinite=int(nonfinite),
            nan=int(row["nan"]),
            posinf=int(row["posinf"]),
            neginf=int(row["neginf"]),
            skewness=row["m3"] / n / (variance * math.sqrt(variance)) if square > 0 else math.nan,
            kurtosis=row["m4"] / n / square if square > 0 else math.nan,
        )
