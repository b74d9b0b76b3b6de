"""Outliers in a series of numbers: far above the level before them, by a factor and by what is usual."""

import pytest

from torchhook.rules.series import jumps, outliers

CALM = {step: 1.0 + 0.01 * (step % 2) for step in range(30)}
NOISY = {step: 10.0 ** (step % 3) for step in range(30)}


@pytest.mark.parametrize(
    ("before", "value", "found"),
    [
        (CALM, 50.0, [(30, 50)]),
        (CALM, 2.0, []),  # more than is usual, but not five times as much
        (NOISY, 100.0, []),  # five times the level, but usual here
        (NOISY, 1e12, [(30, 1e11)]),
        (CALM, float("inf"), []),
    ],
)
def test_an_outlier_is_far_above_by_factor_and_by_deviation(before, value, found):
    told = list(outliers({**before, 30: value}, factor=5))
    assert [step for step, _ in told] == [step for step, _ in found]
    assert [times for _, times in told] == pytest.approx([times for _, times in found], rel=0.02)


def test_a_level_that_stays_is_no_outlier():
    assert not list(outliers({**CALM, **dict.fromkeys(range(30, 40), 50.0)}, factor=5))


def test_a_jump_is_above_the_four_values_before():
    falling = {0: 100.0, 1: 4.0, 2: 3.0, 3: 2.0, 4: 2.0, 5: 14.0}
    assert jumps(falling, 5, factor=5) and not jumps(falling, 5, factor=6)
    assert not jumps(falling, 6, factor=1) and not jumps(falling, 0, factor=1)
