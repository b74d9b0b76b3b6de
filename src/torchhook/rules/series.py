"""Robust detection of outliers in a series of numbers by step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import median


def outliers(
    values: Mapping[int, float], factor: float, little: float = 0.1, noise: int = 8
) -> Iterator[tuple[int, float]]:
    """Steps at which a positive number is far above its values before and after, and how many times.

    On a log scale: above `factor` times the median of the eight values before, and more than six robust deviations of
    the `noise` values before from it. The window is short because the numbers fall or rise by themselves. The first
    sixteen values are skipped, and those below `little` times the first eight.

    >>> [(step, round(times)) for step, times in outliers({**dict.fromkeys(range(30), 1.0), 30: 50.0}, factor=5)]
    [(30, 50)]
    """
    steps = [step for step, value in values.items() if 0 < value < math.inf]
    levels = [math.log(values[step]) for step in steps]
    for number in range(_WARMUP, len(levels)):
        before, after = levels[max(0, number - noise) : number], levels[number + 1 : number + 1 + _WINDOW]
        centre = median(before[-_WINDOW:])
        limit = max(math.log(factor), 6 * 1.4826 * median(abs(level - centre) for level in before))
        has_returned = not after or median(after) < (levels[number] + centre) / 2
        is_little = levels[number] < median(levels[:_WINDOW]) + math.log(little)
        if levels[number] - centre > limit and has_returned and not is_little:
            yield steps[number], math.exp(levels[number] - centre)


def jumps(values: Mapping[int, float], step: int, factor: float) -> bool:
    """Whether the value at `step` is more than `factor` times the median of the four before, and not negligible."""
    before = [value for known, value in values.items() if known < step]
    if step not in values or not before:
        return False
    return values[step] > factor * median(before[-4:]) > 0 and values[step] > _LITTLE * median(before[:8])


_LITTLE = 0.1  # of the first values

_WARMUP, _WINDOW = 16, 8
