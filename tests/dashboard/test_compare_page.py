"""The comparison of runs, without a browser: how layers are aligned, what differs, what is left out."""

import json
import math

import pytest
from dashboard_samples import append, ended, garbage, written
from hypothesis import given
from hypothesis import strategies as st

from torchhook.dashboard.library import OPEN, Library
from torchhook.dashboard.pages import compare
from torchhook.dashboard.pages.compare import aligned
from torchhook.render.figures.curves import curves, loss_curves
from torchhook.render.palette import NONFINITE

pytestmark = pytest.mark.usefixtures("one_thread")


def parts(page, kind):
    """The components of one kind in a page, as plain data."""
    return [part.to_plotly_json()["props"] for part in page._traverse() if type(part).__name__ == kind]


def figure(page, id_):
    return next(props["figure"] for props in parts(page, "Graph") if props["id"] == id_)


def alerts(page):
    return [props["children"] for props in parts(page, "P") if props.get("role") == "alert"]


@given(st.lists(st.sets(st.integers(0, 30)), max_size=4))
def test_runs_of_one_model_keep_its_order_whatever_each_lacks(runs):
    orders = [[str(number) for number in sorted(run)] for run in runs]
    merged = aligned(orders)
    assert sorted(merged) == sorted({path for order in orders for path in order})
    for order in orders:
        assert [path for path in merged if path in order] == order


def test_runs_that_disagree_about_the_order_are_compared_all_the_same():
    assert aligned([["a", "b", "c"], ["b", "a", "d"]]) == ["a", "b", "c", "d"]


def test_runs_of_different_models_do_not_interleave():
    assert aligned([["a", "b", "c"], ["x", "y"]]) == ["a", "b", "c", "x", "y"]


def test_losses_that_are_not_finite_are_crosses():
    figure = loss_curves({"a": ([0, 1, 2], [2.0, math.nan, 1.0])})
    assert figure.data[0].y == (2.0, None, 1.0)
    assert (figure.data[1].name, figure.data[1].x, figure.data[1].marker.color) == ("not finite", (1,), NONFINITE)


def test_few_points_beside_many_are_not_joined():
    many, few = curves({"many": ([*range(100)], [1.0] * 100), "few": ([0, 70], [1.0, 2.0])}, "share").data
    assert (many.mode, few.mode) == ("lines", "markers")


def test_runs_without_a_layer_in_common_have_no_difference(tmp_path):
    ended(tmp_path / "one", sites=("conv", "fc"))
    ended(tmp_path / "two", sites=("stem", "head"))
    drawn = figure(compare.page(Library(tmp_path), ["one", "two"]), "compare-difference")
    assert drawn.layout.annotations[0].text == "no layer of one run was measured in the other"


def test_lines_of_runs_with_other_layers_run_from_left_to_right(tmp_path):
    ended(tmp_path / "short", sites=("conv", "fc"))
    ended(tmp_path / "long", sites=("conv", "norm", "fc", "head"))
    page = compare.page(Library(tmp_path), ["short", "long"])
    for id_ in ("compare-gradients", "compare-spreads"):
        drawn = figure(page, id_)
        assert drawn.layout.xaxis.ticktext == ("conv", "norm", "fc", "head")
        for line in drawn.data:
            assert list(line.x) == sorted(line.x)


def test_the_difference_is_the_second_divided_by_the_first(tmp_path):
    ended(tmp_path / "a", range(0, 20, 2), sites=("conv", "fc"))
    ended(tmp_path / "b", range(0, 12, 2), sites=("conv", "norm", "fc"), scale=100.0)
    drawn = figure(compare.page(Library(tmp_path), ["a", "b"]), "compare-difference")
    values = drawn.data[0]
    assert values.x == tuple(range(0, 12, 2)) and values.y == ("conv", "norm", "fc")
    assert [row[1] for row in values.z] == [None] * 6  # which the first has not
    assert [row[0] for row in values.z] == pytest.approx([2.0] * 6, abs=0.01)  # powers of ten: 100 times as much
    assert values.zmid == 0


def test_what_is_zero_in_one_run_only_is_in_the_colour_of_zero(tmp_path):
    ended(tmp_path / "a")
    ended(tmp_path / "b", scale=0.0)
    drawn = figure(compare.page(Library(tmp_path), ["a", "b"]), "compare-difference")
    zeros = next(trace for trace in drawn.data if trace.name == "zero")
    assert zeros.y == ("conv", "fc") and drawn.data[0].z == ([None, None],) * 3
    same = figure(compare.page(Library(tmp_path), ["b", "b"]), "compare-difference")
    assert same.data[0].z == ([0.0, 0.0],) * 3


def test_steps_that_only_one_run_measured_are_compared_with_the_nearest():
    assert compare._nearest([0, 10, 20], 10) == 10
    assert [compare._nearest([0, 10, 20], step) for step in (0, 4, 6, 19, 20)] == [0, 0, 10, 20, 20]
    assert math.isnan(compare._ratio(math.nan, 1.0)) and compare._ratio(None, 1.0) is None


def test_a_broken_run_is_a_line_and_the_others_are_compared(tmp_path):
    ended(tmp_path / "net")
    ended(tmp_path / "other")
    garbage(tmp_path / "garbage")
    page = compare.page(Library(tmp_path), ["garbage", "net", "gone", "other"])
    assert [line.name for line in figure(page, "compare-loss").data] == ["net", "other"]
    broken, gone = alerts(page)
    assert broken.startswith("garbage is left out: ") and "is corrupt" in broken
    assert gone.startswith("gone is left out: there is no run 'gone'")
    assert len(alerts(compare.page(Library(tmp_path), ["garbage", "gone"]))) == 2


def test_more_runs_than_are_open_at_a_time_are_left_out(tmp_path):
    names = [ended(tmp_path / f"net-{number}", range(1)).name for number in range(OPEN + 2)]
    page = compare.page(Library(tmp_path), names)
    assert len(figure(page, "compare-loss").data) == OPEN
    assert [line.split(":")[0] for line in alerts(page)] == [f"{name} is left out" for name in names[OPEN:]]


def test_runs_that_have_just_begun_are_compared(tmp_path):
    log = written(tmp_path / "fresh", [])
    ended(tmp_path / "net")
    library = Library(tmp_path)
    assert figure(compare.page(library, ["fresh", "net"]), "compare-difference").layout.annotations
    append(log, range(2))
    page = compare.page(library, ["fresh", "net"])
    assert figure(page, "compare-difference").data[0].x == (0, 1)
    assert json.loads(json.dumps(next(iter(parts(page, "Store")))["data"]))["runs"] == ["fresh", "net"]
