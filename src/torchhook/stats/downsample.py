"""Which steps to drop when there are too many.

Old steps are thinned out evenly: a long training keeps its beginning as well as its end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most `most` of the sorted `steps`: the first step in each interval of 2ⁿ steps, for the smallest fitting n.

    With a power of two, the choice from a longer sequence is among the earlier choice.

    >>> spread(range(0, 100, 10), 4), spread(range(0, 200, 10), 4)
    ([0, 40, 70], [0, 70, 130])
    """
    if len(steps) <= most:
        return list(steps)
    exponent = max(0, ((steps[-1] - steps[0]) // most).bit_length() - 1)
    while True:
        first_of = {step >> exponent: step for step in reversed(steps)}
        if len(first_of) <= most:
            return list(first_of.values())[::-1]
        exponent += 1


def thinned(steps: Sequence[int], keep: Collection[int] = ()) -> list[int]:
    """Those of the sorted `steps` to drop: at least half of all but the newest quarter, and none of `keep`.

    >>> thinned(range(16), keep=[5])
    [1, 3, 7, 9, 11]
    """
    old = steps[: len(steps) * 3 // 4]
    kept = {*spread(old, max(1, len(old) // 2)), *keep}
    return [step for step in old if step not in kept]


def measured_at(steps: Sequence[int], named: Collection[int]) -> set[int]:
    """Where the `named` steps were measured: the first of the sorted `steps` that is not before each, or the last.

    >>> measured_at([0, 10, 20], [3, 10, 99])
    {10, 20}
    """
    return {steps[min(bisect_left(steps, step), len(steps) - 1)] for step in named} if steps else set()
