"""Wires beside a list: none of them lies on another."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from torchhook.dashboard.graph_layout import Wire, in_lanes

WIRES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(lambda ends: ends[0] != ends[1]), unique=True)


@given(WIRES)
def test_wires_in_one_lane_do_not_meet(ends):
    placed = in_lanes(Wire(*end) for end in ends)
    assert len({wire for wire, _ in placed}) == len(placed) and {wire for wire, _ in placed} <= set(ends)
    for (one, lane), (other, other_lane) in combinations(placed, 2):
        if lane == other_lane:
            assert max(one) <= min(other) or max(other) <= min(one)


def test_what_finds_no_lane_is_left_out():
    wires = [Wire(start, 100 + start) for start in range(40)]  # all of them pass by line 50
    placed = in_lanes(wires)
    assert 0 < len(placed) < 40 and sorted(lane for _, lane in placed) == list(range(len(placed)))
