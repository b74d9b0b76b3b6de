"""Plots by layer: gradients, distributions, statistics over steps; of one layer, of hundreds, of broken ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import LogNorm, SymLogNorm, to_rgba
from still_samples import HOSTILE, chain, legend, measured, png, reading_of, resnet, rows
from torch import nn

import torchhook
from torchhook import NotRecordedError, Report, Run
from torchhook.plot import distributions, gradient_flow, layer_heatmap
from torchhook.plot.style import ODD
from torchhook.rules.entry import Entry
from torchhook.rules.history import settled
from torchhook.training.runs import RunLog
from torchhook.training.runs.queries import Series
from training.runs import run_samples

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def measured_resnet(one_thread):
    torch.manual_seed(0)
    return resnet()


@pytest.fixture
def run(tmp_path):
    ports = ("output", "param", "grad_output")
    log = run_samples.written(RunLog(tmp_path), range(4), stats=("moments", "histogram"), ports=ports)
    log.write(run_samples.entry_at(4, ports=("output",)))
    with Run(tmp_path) as found:
        yield found


def points(figure, number=0):
    """What a line shows: sizes by row."""
    line = figure.axes[0].lines[number]
    return dict(zip(line.get_ydata(), line.get_xdata(), strict=True))


def marks(figure, said):
    """The rows of marks at an end of the axis."""
    found = [one for one in figure.axes[0].collections if one.get_label() == said]
    return [round(y) for one in found for _, y in one.get_offsets().tolist()]


def test_the_class_of_each_layer_stands_beside_it(measured_resnet):
    for figure in (gradient_flow(measured_resnet), distributions(measured_resnet)):
        classes = {round(text.get_position()[1]): text.get_text() for text in figure.axes[0].texts}
        named = {rows(figure).index(path): kind for path, kind in (("conv1", "Conv2d"), ("fc", "Linear"))}
        assert named.items() <= classes.items() and figure.axes[0].get_ylabel() == "layer"


def test_gradients_of_a_real_model_in_execution_order(measured_resnet):
    figure = gradient_flow(measured_resnet)
    names = rows(figure)
    assert names[:4] == ["conv1", "bn1", "relu", "maxpool"] and names[-1] == "fc"
    assert figure.axes[0].get_xscale() == "log" and figure.axes[0].yaxis_inverted()
    reading = measured_resnet["conv1", "grad_output"]
    assert points(figure)[0] == pytest.approx(reading.l2 / reading.count**0.5)
    assert png(figure)


def test_gradients_of_parameters_are_in_the_rows_of_their_modules():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    x = torch.randn(8, 4)
    both = gradient_flow(measured(model, x, grads=True, param_grads=True))
    assert rows(both) == ["0", "1", "2"]
    assert sorted(both.axes[0].lines[1].get_ydata()) == [0, 0, 2, 2]
    model.zero_grad()
    alone = gradient_flow(measured(model, x, outputs=False, param_grads=True))
    assert rows(alone) == ["0", "2"]
    model.zero_grad()
    model(x).sum().backward()
    sizes = sorted(p.grad.square().mean().sqrt().item() for p in model.parameters())
    assert sorted(alone.axes[0].lines[0].get_xdata()) == pytest.approx(sizes)


def test_gradients_with_an_optimizer_are_norms():
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchhook.measure(model, param_grads=True, optimizer=optimizer) as stats:
        model(torch.ones(3, 4)).sum().backward()
        norms = sorted(p.grad.norm().item() for p in model.parameters())
        optimizer.step()
    figure = gradient_flow(stats.snapshot())
    assert legend(figure) == ["parameter gradient (norm)"]
    assert sorted(figure.axes[0].lines[0].get_xdata()) == pytest.approx(norms)


def test_zeros_and_what_is_not_finite_are_marked_at_the_ends():
    numbers = [1e-3, 0.0, math.nan, math.inf, 0.1]
    figure = gradient_flow(Report(layers=tuple({"site": str(n), "kind": "module", "grad_norm": n} for n in numbers)))
    assert points(figure) == {0: 1e-3, 4: 0.1}
    assert marks(figure, "zero") == [1] and marks(figure, "not finite") == [2, 3]
    low, high = figure.axes[0].get_xlim()
    assert 1e-4 < low < 1e-3 and 0.1 < high < 1  # the marks do not stretch the axis


def test_gradients_of_a_report_and_of_a_run(run):
    layers = (
        {"site": "fc", "kind": "module", "grad_norm": 0.5},
        {"site": "fc.weight", "kind": "parameter", "grad_norm": 2.0},
        {"site": "relu", "kind": "module", "std": 1.0},
    )
    figure = gradient_flow(Report(layers=layers))
    assert rows(figure) == ["fc"] and points(figure) == {0: 0.5} and points(figure, 1) == {0: 2.0}
    assert legend(figure) == ["output gradient (RMS)", "parameter gradient (norm)"]
    of_run = gradient_flow(run)  # the last window has no gradients: it is the one before
    reading = run.window(3)["conv", "grad_output"]
    assert points(of_run)[0] == pytest.approx(reading.l2 / reading.count**0.5)


@pytest.mark.parametrize("draw", [gradient_flow, distributions])
@pytest.mark.parametrize("count", [1, 500])
def test_one_layer_and_five_hundred(draw, count):
    stats = chain(count, grads=True)
    figure = draw(stats)
    assert 1 <= len(rows(figure)) <= 75 and rows(figure)[0] == "0"
    assert figure.get_figheight() <= 12 and png(figure)


@pytest.mark.parametrize("kind", ["box", "ridge"])
@pytest.mark.parametrize("port", ["output", "param", "grad_output"])
def test_distributions_of_a_real_model(measured_resnet, kind, port):
    figure = distributions(measured_resnet, kind, port)
    assert rows(figure)[0] == ("conv1.weight" if port == "param" else "conv1") and png(figure)


def test_boxes_are_quantiles():
    figure = distributions(reading_of(("a", torch.linspace(0, 8, 10_001)), ("b", torch.full((50,), 3.0))))
    first, second = figure.axes[0].patches
    assert (first.get_x(), first.get_x() + first.get_width()) == pytest.approx((2, 6), rel=0.05)
    assert (second.get_x(), second.get_width()) == (3, 0)  # as exactly as the extremes are known
    medians = next(one for one in figure.axes[0].collections if one.get_label() == "median")
    assert [line[0][0] for line in medians.get_segments()] == pytest.approx([4, 3], rel=0.05)


def ridges(figure):
    (found,) = [one for one in figure.axes[0].collections if one.get_label() == "density"]
    return [path.vertices for path in found.get_paths()]


def test_a_ridge_is_highest_where_most_values_are():
    values = torch.cat([torch.randn(20_000) * 0.3 + 4, torch.randn(2_000) - 4])
    (outline,) = ridges(distributions(reading_of(("a", values)), "ridge"))
    highest = outline[outline[:, 1].argmin()]  # rows go down
    assert highest[0] == pytest.approx(4, abs=0.3) and highest[1] == pytest.approx(-1.25)
    assert outline[:, 0].min() < -5 and outline[:, 1].max() == 0


def test_zeros_are_apart_from_a_ridge():
    values = torch.cat([torch.zeros(300), torch.rand(100) + 1])
    figure = distributions(reading_of(("relu", values), ("dead", torch.zeros(9)), ("fc", torch.rand(50) + 1)), "ridge")
    (zeros,) = [one for one in figure.axes[0].collections if one.get_label() == "share of zeros"]
    heights = [float(segment[0][1] - segment[1][1]) for segment in zeros.get_segments()]
    assert heights == [0.75, 1.0] and [segment[0][1] for segment in zeros.get_segments()] == [0, 1]
    outlines = ridges(figure)
    assert len(outlines) == 2 and outlines[0][outlines[0][:, 1] < 0][:, 0].min() > 0.5


def test_a_constant_layer_is_a_ridge_at_its_value():
    _, outline = ridges(distributions(reading_of(("a", torch.randn(99) * 5), ("b", torch.full((9,), 3.0))), "ridge"))
    assert outline[:, 0].min() + outline[:, 0].max() == pytest.approx(6) and outline[:, 0].max() > 3


def test_scales_far_apart_get_an_axis_by_powers_of_ten():
    near = distributions(reading_of(("a", torch.randn(99)), ("b", torch.randn(99) * 10)))
    far = distributions(reading_of(("a", torch.randn(99)), ("b", torch.randn(99) * 1e5)), "ridge")
    assert near.axes[0].get_xscale() == "linear" and far.axes[0].get_xscale() == "symlog" and png(far)


@pytest.mark.parametrize("kind", ["box", "ridge"])
def test_broken_layers_are_marked(kind):
    odd = torch.tensor([1.0, 2.0, math.nan])
    snapshot = reading_of(("fine", torch.randn(50)), ("odd", odd), ("gone", torch.full((4,), math.inf)))
    figure = distributions(snapshot, kind)
    assert marks(figure, "some not finite") == [1, 2] and png(figure)
    histograms_alone = reading_of(("gone", [math.nan]), stats=("histogram",))
    assert marks(distributions(histograms_alone, kind), "some not finite") == [0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=1, max_size=20),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["box", "ridge"]),
)
def test_any_numbers_have_a_distribution(layers, kind):
    snapshot = reading_of(*((f"layer{number}", values) for number, values in enumerate(layers)))
    assert png(distributions(snapshot, kind))


def test_distributions_of_a_run_are_those_of_the_last_window_that_has_them(run):
    figure = distributions(run, port="param")
    assert rows(figure) == ["conv", "layers.0.fc", "head"]
    bins = run.window(3)["conv", "param"].histogram()
    box = figure.axes[0].patches[0]
    assert box.get_x() == pytest.approx(bins.quantile(0.25))


def test_a_series_is_drawn_by_layer_and_step():
    values = torch.tensor([[0.1, 0.2, 0.3], [0.5, math.nan, 0.9]])
    figure = layer_heatmap(Series([0, 10, 100], ["conv", ""], values), "zero_fraction")
    mesh, _ = figure.axes[0].collections
    assert mesh.get_array().filled(-1).flatten().tolist() == pytest.approx([0.1, 0.2, 0.3, 0.5, -1, 0.9])
    assert rows(figure) == ["conv", "the model"] and figure.axes[0].yaxis_inverted()
    assert mesh.get_coordinates()[0, :, 0].tolist() == [-5, 5, 55, 145]  # steps have the room that they took
    assert marked(figure) == {"not measured": [(5.0, 50.0, 1)]} and png(figure)
    assert figure.axes[1].get_ylabel() == "share of zeros"


def marked(figure):
    """The marked cells of a heat map, by meaning: where they begin, how wide they are, and in which row."""
    names, found = {to_rgba(colour): meaning for meaning, (colour, _) in ODD.items()}, {}
    for bars in figure.axes[0].collections[1:]:
        meaning = names[tuple(bars.get_facecolor()[0])] if len(bars.get_facecolor()) else "negative"
        for path in bars.get_paths():
            (left, top), (right, bottom) = path.vertices.min(0), path.vertices.max(0)
            found.setdefault(meaning, []).append((left, right - left, round((top + bottom) / 2)))
    return found


def test_zero_and_dead_are_loud_in_colour_and_in_grey_and_never_a_gap():
    values = torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, 0.0], [math.inf, 1.0, math.nan]])
    figure = layer_heatmap(Series([0, 1, 2], ["a", "b", "c"], values))
    wanted = {"zero": [(0.5, 2.0, 1)], "not finite": [(-0.5, 1.0, 2)], "not measured": [(1.5, 1.0, 2)]}
    assert marked(figure) == wanted and legend(figure) == list(wanted)
    assert [bars.get_hatch() for bars in figure.axes[0].collections[1:]] == [ODD[meaning][1] for meaning in wanted]
    assert figure.axes[0].collections[0].norm.vmin == 0, "zeros do not stretch the scale"


def test_zeros_that_mean_health_are_not_loud_and_dead_layers_are():
    shares = layer_heatmap(Series([0, 1], ["a", "b"], torch.tensor([[0.0, 0.5], [1.0, 1.0]])), "zero_fraction")
    assert marked(shares) == {"zero": [(-0.5, 2.0, 1)]}
    assert marked(layer_heatmap(Series([0, 1], ["a"], torch.tensor([[0.0, 5.0]])), "nonfinite")) == {}
    means = layer_heatmap(Series([0, 1, 2], ["a"], torch.tensor([[-1.0, 0.0, 1.0]])), "mean")
    assert marked(means) == {"negative": [(-0.5, 1.0, 0)]}, "the sign shows in grey, too"


def test_a_layer_of_a_run_with_nan_is_loud(tmp_path):
    values = {"fine": torch.randn(8), "odd": torch.tensor([1.0, 2.0, math.nan])}
    log = RunLog(tmp_path)
    log.begin({"model": "Net"})
    log.write(Entry(0, 0.0, settled(reading_of(*values.items()))))
    with Run(tmp_path) as run:
        assert marked(layer_heatmap(run)) == {"not finite": [(-0.5, 1.0, 1)]}
        assert marked(layer_heatmap(run, "nonfinite")) == {}


def test_the_gradients_of_a_run_name_their_step(run):
    assert "at step 3 " in gradient_flow(run).axes[0].get_xlabel()  # in step 4, no gradients were measured


def test_a_run_is_drawn_by_layer_and_step(run):
    figure = layer_heatmap(run, "mean", port="param")
    mesh = figure.axes[0].collections[0]
    wanted = run.series("mean", port="param")
    assert (
        torch.tensor(mesh.get_array().filled(math.nan)).nan_to_num(-1).tolist() == wanted.values.nan_to_num(-1).tolist()
    )
    assert mesh.norm.vmin == -mesh.norm.vmax and rows(figure) == wanted.paths
    with pytest.raises(ValueError, match="stat must be one of count, mean.*not 'nonsense'"):
        layer_heatmap(run, "nonsense")


def test_the_scale_of_colours_fits_the_values():
    def norm(values):
        mesh, *_ = layer_heatmap(Series(list(range(len(values))), ["a"], torch.tensor([values]))).axes[0].collections
        assert not mesh.get_array().mask.any()
        return mesh.norm

    assert norm([0.0, 1.0, 2.0]).vmin == 0
    assert isinstance(norm([0.0, 1e-5, 1.0]), LogNorm)
    assert norm([-1.0, 2.0]).vmin == -2
    assert isinstance(norm([-1e-5, 1e-5, 1e-5, 1e3]), SymLogNorm)
    assert norm([0.0, 0.0]).vmax > 0 and norm([5.0]).vmax == 5


def test_hundreds_of_layers_by_a_thousand_steps():
    figure = layer_heatmap(Series(list(range(1000)), [f"l{n}" for n in range(500)], torch.rand(500, 1000)))
    assert len(rows(figure)) <= 75 and png(figure)


def test_names_are_shown_as_they_are():
    figure = layer_heatmap(Series([0], HOSTILE, torch.rand(len(HOSTILE), 1)), "$stat")
    assert [name.replace(r"\$", "$") for name in rows(figure)[:3]] == HOSTILE[:3] and rows(figure)[-1] == "the model"
    assert png(figure)
    snapshot = reading_of(*((name.encode("utf-8", "replace").decode(), torch.randn(9)) for name in HOSTILE))
    assert png(distributions(snapshot)) and png(distributions(snapshot, "ridge"))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda stats: gradient_flow(stats), NotRecordedError, r"only at output; call measure\(..., grads=True\)"),
        (lambda stats: gradient_flow(Report()), NotRecordedError, "the report has no gradients"),
        (lambda stats: gradient_flow("x"), TypeError, "stats must be the result of measure"),
        (lambda stats: distributions(stats, port="nope"), NotRecordedError, "no port 'nope'; the ports are output"),
        (lambda stats: distributions(stats, "violin"), ValueError, "kind must be 'box' or 'ridge', not 'violin'"),
        (
            lambda stats: distributions(stats),
            NotRecordedError,
            r"no histogram was measured at the port 'output'; call measure\(..., stats=\('moments', 'histogram'\)\)",
        ),
        (lambda stats: layer_heatmap(stats), TypeError, "run must be a Run or a Series"),
        (
            lambda stats: layer_heatmap(Series([0], ["a"], torch.ones(2, 2))),
            ValueError,
            r"paths × steps, not of shape \[2, 2\] for 1 paths and 1 steps",
        ),
        (lambda stats: layer_heatmap(Series([], [], torch.ones(0, 0))), NotRecordedError, "no std to draw"),
    ],
)
def test_refuses_with_a_remedy(call, error, said):
    model = nn.ReLU()
    with torchhook.measure(model, "") as stats:
        model(torch.ones(2))
    with pytest.raises(error, match=said):
        call(stats)


def test_a_run_without_what_is_asked_for_says_so(run):
    with pytest.raises(NotRecordedError, match="nothing was measured at the port 'input', only at output, "):
        layer_heatmap(run, port="input")
