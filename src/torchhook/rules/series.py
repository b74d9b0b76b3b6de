"""Numbers over steps: what leaves its own past, robustly."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median


def outliers(
    values: Mapping[int, float], factor: float, deviations: float = 8, warmup: int = 20, window: int = 128
) -> Iterator[tuple[int, float]]:
    """Steps at which a positive number is far above the median of those before it, and how many times.

    By the logarithm: more than `deviations` robust ones, and `factor` times the median.

    >>> [(step, round(times)) for step, times in outliers({**dict.fromkeys(range(30), 1.0), 30: 50.0}, factor=5)]
    [(30, 50)]
    """
    past: list[float] = []
    for step, value in values.items():
        if not 0 < value < math.inf:
            continue
        level = math.log(value)
        if len(past) >= warmup:
            centre = median(past[-window:])
            spread = 1.4826 * median(abs(known - centre) for known in past[-window:])
            if level - centre > max(math.log(factor), deviations * max(spread, 0.05)):
                yield step, math.exp(level - centre)
        past.append(level)
