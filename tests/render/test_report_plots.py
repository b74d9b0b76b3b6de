"""The figures of a report: what is drawn, where what has no place goes, and nothing when there is nothing."""

import math
import sys

import pytest
import report_samples

from torchhook.core.findings import Finding, Report
from torchhook.render.figures import (
    Stretch,
    activations,
    curves,
    distributions,
    gradient_flow,
    health_map,
    heatmap,
    layer_lines,
    loss_curve,
    updates,
)
from torchhook.render.palette import LINES, NONFINITE, ORANGE, UNMEASURED, VERMILLION

FIGURES = [loss_curve, gradient_flow, activations, updates]


def module(site, **numbers):
    return {"site": site, "kind": "module", **numbers}


def parameter(site, **numbers):
    return {"site": site, "kind": "parameter", **numbers}


@pytest.mark.parametrize("figure", FIGURES)
def test_nothing_to_show_is_none(figure):
    assert figure(Report()) is None
    assert figure(Report(layers=(module("a", std=None), parameter("b")), losses={0: None})) is None


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("name", ["sick", "healthy", "hostile", "large"])
def test_every_report_can_be_drawn(figure, name):
    assert "NaN" not in figure(getattr(report_samples, name)()).to_json()


def test_layers_keep_their_order():
    figure = gradient_flow(Report(layers=(module("b", grad_norm=0.1), module("a", grad_norm=0.01))))
    assert figure.data[0].y == (0.1, 0.01)
    assert figure.layout.xaxis.ticktext == ("b", "a")
    assert figure.layout.yaxis.type == "log"


def test_the_steps_of_gradients_are_chosen_by_a_slider():
    layers, gradients = (
        (module("a", grad_norm=0.1), module("b", grad_norm=math.nan)),
        {5: (1.0, 10.0), 7: (0.1, math.nan)},
    )
    figure = gradient_flow(Report(layers=layers, gradients=gradients, span=(7, 7)))
    (slider,) = figure.layout.sliders
    assert [step.label for step in slider.steps] == ["5", "7"] and slider.active == 1
    assert [frame.data[0].y for frame in figure.frames] == [(1.0, 10.0), (0.1, None)]
    assert [frame.data[1].x for frame in figure.frames] == [(), (2,)]
    assert figure.layout.yaxis.range[1] > 1  # on which all steps can be seen
    assert not gradient_flow(Report(layers=layers)).layout.sliders


def test_names_do_not_cross_the_title_below():
    names = [f"transformer.h.{number}.attn" for number in range(12)]
    layers = [module(name, grad_norm=1.0) for name in names] + [parameter(f"{name}.w", grad_norm=1.0) for name in names]
    figure = gradient_flow(Report(layers=tuple(layers)))
    between = figure.layout.yaxis.domain[0] - figure.layout.yaxis2.domain[1]
    below = 7 * 20  # pixels of the names below the last panel, which take their room from the plots
    assert between * (figure.layout.height - 36 - below) > 7 * max(map(len, names))


def test_zero_and_nan_are_shown_though_they_have_no_height():
    numbers = [1e-3, 0.0, math.nan, math.inf, 0.1]
    figure = gradient_flow(Report(layers=tuple(module(str(n), grad_norm=n) for n in numbers)))
    points, odd = figure.data
    assert points.y == (1e-3, None, None, None, 0.1)
    assert odd.x == (2, 3, 4) and odd.marker.symbol == ("triangle-down", "x", "x")
    assert odd.y[0] < 1e-3 and odd.y[1] > 0.1


def test_extreme_numbers_can_be_drawn():
    assert gradient_flow(Report(layers=(module("a", grad_norm=5e-324), module("b", grad_norm=1.7e308)))).to_json()


def test_the_zero_share_of_zero_has_a_height():
    assert activations(Report(layers=(module("a", zero_fraction=0.0),))).data[0].y == (0.0,)


def test_updates_outside_of_the_band_differ_in_shape_and_colour():
    ratios = [1e-3, 0.3, 1e-7]
    figure = updates(Report(layers=tuple(parameter(str(r), update_ratio=r) for r in ratios)))
    assert figure.data[0].marker.symbol == ("circle", "diamond", "diamond")
    assert len(set(figure.data[0].marker.color)) == 2
    assert [figure.layout.shapes[0].y0, figure.layout.shapes[0].y1] == [1e-5, 3e-2]


def test_names_are_no_markup():
    site = "<a href='https://x'>fc</a>\u202e"
    figure = updates(Report(layers=(parameter(site, update_ratio=1e-3),)))
    assert figure.data[0].text[0].startswith("<b>&lt;a href='https://x'&gt;fc&lt;/a&gt;</b>")
    assert "<" not in figure.layout.xaxis.ticktext[0]


def test_of_many_layers_some_have_names_below():
    figure = gradient_flow(report_samples.large())
    axis, points = figure.layout.xaxis, figure.data[0]
    assert len(points.y) == 500 and 20 <= len(axis.ticktext) <= 30
    named = dict(zip(axis.tickvals, axis.ticktext, strict=True))
    told = dict(zip(points.x, points.text, strict=True))
    assert all(name.lstrip("…") in told[number] for number, name in named.items())


def test_findings_are_marked_on_the_curve():
    found = (
        Finding("TH1", "warning", "", "a", step=2),
        Finding("TH2", "error", "", "b", step=2),
        Finding("TH3", "info", ""),
    )
    curve, crosses, marks, _ = loss_curve(Report(found, losses={0: 3.0, 1: math.nan, 2: 2.0, 3: 1.0})).data
    assert curve.x == (0, 2, 3)
    assert crosses.x == (1,) and crosses.y == (3.0,)
    assert marks.x == (2,) and marks.y == (2.0,) and marks.text == ("TH1 a<br>TH2 b",)
    assert marks.marker.color == ("#d55e00",)


@pytest.mark.parametrize(("high", "ticks"), [(5, 6), (15, 3), (200, 6)])
def test_an_axis_of_some_powers_of_ten_is_not_crowded(high, ticks):
    assert curves({"fc": ([0, 1], [1.0, high])}, "gradient norm").layout.yaxis.nticks == ticks


def test_a_cause_without_a_step_is_marked_where_its_first_consequence_is():
    affected = tuple(Finding("TH403", "warning", "", step=step) for step in (None, 7, 5))
    found = Finding("TH402", "error", "", "a", affected=affected)
    marks = loss_curve(Report((found,), losses={0: 3.0, 9: 2.0})).data[2]
    assert marks.x == (5,) and marks.text == ("TH402 a",)


def test_a_step_between_two_losses_and_one_after_all_are_marked():
    found = tuple(Finding("TH1", "info", "", step=step) for step in (5, 99))
    assert loss_curve(Report(found, losses={0: 3.0, 10: 2.0})).data[2].y == (2.0, 2.0)


def test_a_loss_that_is_never_finite_is_still_shown():
    figure = loss_curve(Report((Finding("TH1", "error", "", step=0),), losses={0: math.nan}))
    assert figure.data[1].x == (0,)


def test_long_curves_are_thinned_and_spikes_stay():
    losses = dict.fromkeys(range(100_000), 1.0) | {54_321: 9.0}
    curve = loss_curve(Report(losses=losses)).data[0]
    assert len(curve.x) <= 2000 and 9.0 in curve.y and list(curve.x) == sorted(curve.x)


def test_a_wide_range_of_losses_gets_a_log_scale():
    assert loss_curve(Report(losses={0: 100.0, 1: 0.1})).layout.yaxis.type == "log"
    assert loss_curve(Report(losses={0: 100.0, 1: -0.1})).layout.yaxis.type == "linear"


@pytest.mark.parametrize("figure", FIGURES)
def test_without_plotly_the_extra_is_named(figure, monkeypatch):
    for name in ("graph_objects", "subplots"):
        monkeypatch.setitem(sys.modules, f"plotly.{name}", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[plot\]"'):
        figure(report_samples.healthy())


def test_a_line_ends_where_nothing_was_measured_for_long():
    line = curves({"fc": ([0, 1, 2, 3, 500, 501], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])}, "gradient norm").data[0]
    assert line.y == (1.0, 2.0, 3.0, 4.0, None, 5.0, 6.0) and "markers" in line.mode
    steps = [*range(0, 100, 4), *range(100, 150)]  # older steps are thinned out
    assert None not in curves({"fc": (steps, [1.0] * len(steps))}, "gradient norm").data[0].y


def test_a_measurement_has_only_its_own_step_in_a_heat_map():
    figure = heatmap("std", [0, 1, 2, 500], ["fc"], [[1.0], [10.0], [100.0], [1000.0]])
    drawn = figure.data[0]
    assert figure.layout.plot_bgcolor == UNMEASURED
    assert drawn.x == (0, 1, 2, 3, 499, 500) and drawn.z == ([0.0], [1.0], [2.0], [None], [None], [3.0])


def test_a_distribution_without_finite_values_is_a_cross_and_no_box():
    boxes, crosses = distributions([0, 5, 9], [[0, 1, 2, 3, 4, 5, 6], [math.nan] * 7, [0, 1, 2, 3, 4, 5, 60]]).data
    assert boxes.x == ("0", "9") and crosses.x == ("5",) and crosses.y[0] > 60
    assert crosses.marker.color == NONFINITE


def test_a_distribution_over_many_orders_can_be_read():
    figure = distributions([0, 5], [[-3, -2, -1, 0, 1, 2, 3], [-1e10, -1e6, -1.0, 1.0, 1e3, 1e6, 1e10]])
    assert max(figure.data[0].upperfence) < 50 * figure.data[0].upperfence[0]
    assert figure.layout.yaxis.ticktext[0].startswith("-1e+") and "0" in figure.layout.yaxis.ticktext


def test_crosses_are_above_the_curve():
    for log in (True, False):
        line, crosses = curves({"fc": ([0, 1, 2], [1.0, 9.0, math.nan])}, "output", log).data
        assert crosses.y[0] > max(height for height in line.y if height is not None)


def test_marks_show_to_which_of_several_lines_they_belong():
    runs = {"one": (["a", "b"], [0.0, 1.0]), "two": (["a", "b"], [math.nan, 1.0])}
    figure = layer_lines(runs, "gradient norm")
    assert [trace.marker.line.color for trace in figure.data[1::2]] == list(LINES[:2])
    assert not {ORANGE, VERMILLION} & set(LINES[:4])  # which look like what is not finite


def test_a_finding_without_a_step_is_hatched_and_named_first():
    paths = [f"h.{number}" for number in range(100)]
    bars = [Stretch("h.33", 0, 90, "TH202, step not known", is_dated=False), Stretch("h.77", 40, 90, "TH201")]
    figure = health_map(paths, (0, 90), {"error": bars})
    assert figure.data[-1].marker.pattern.shape == ("/", "")
    assert {"h.33", "h.77"} <= set(figure.layout.yaxis.tickvals) and len(figure.layout.yaxis.tickvals) < 40


def test_a_log_axis_has_whole_powers_of_ten():
    assert loss_curve(Report(losses={0: 100.0, 1: 1e-3})).layout.yaxis.dtick == 1
    assert curves({"fc": ([0, 1], [1.0, 1e12])}, "gradient norm").layout.yaxis.dtick == 2
