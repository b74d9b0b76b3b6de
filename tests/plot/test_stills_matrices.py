"""Matrices and sweeps; and what holds for all stills: a place to draw in, no display, matplotlib only when needed."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from still_samples import HOSTILE, chain, legend, png, rows
from torch import nn

import torchhook
from torchhook import Site, plot
from torchhook.edits.sweep import Sweep, SweepRow
from torchhook.plot import similarity, sweep
from torchhook.plot.style import label
from torchhook.render.palette import NONFINITE, UNMEASURED
from torchhook.training.runs.queries import Series

pytestmark = pytest.mark.usefixtures("one_thread")


def texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_matrix_with_its_numbers():
    figure = similarity(torch.tensor([[1.0, 0.25], [0.5, math.nan]]), rows=["a", "b"], columns=["c", "d"])
    assert texts(figure) == ["1.00", "0.25", "0.50", "NaN"]
    assert rows(figure) == ["a", "b"] and [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["c", "d"]
    (image,) = figure.axes[0].images
    assert (image.norm.vmin, image.norm.vmax) == (0, 1) and png(figure)


def test_what_cka_returns_names_its_layers():
    torch.manual_seed(0)
    first, second = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(4, 3))
    batches = torch.randn(64, 4).split(16)
    both = torchhook.compare.cka(first, second, batches, progress=False)
    figure = similarity(both)
    (image,) = figure.axes[0].images
    assert np.allclose(image.get_array(), both.matrix) and rows(figure) == ["0", "1"]
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["0"]
    assert (figure.axes[0].get_ylabel(), figure.axes[0].get_xlabel()) == ("layer of a", "layer of b")
    assert figure.axes[1].get_ylabel() == "cka"
    alone = similarity(torchhook.compare.cka(first, None, batches, progress=False), rows=["in", "out"])
    assert rows(alone) == ["in", "out"] and alone.axes[0].get_ylabel() == "layer"
    with pytest.raises(TypeError, match="matrix must be .* or what torchhook.compare.cka returned, not Linear"):
        similarity(second[0])


def test_below_zero_the_scale_has_both_signs_and_beyond_one_it_grows():
    assert similarity([[-0.5, 0.5]]).axes[0].images[0].norm.vmin == -1
    assert similarity([[0.5, 7.0]]).axes[0].images[0].norm.vmax == 7


def test_a_number_that_is_rounded_to_zero_has_no_sign():
    assert [text.get_text() for text in similarity([[-0.001, -0.5]]).axes[0].texts] == ["0.00", "-0.50"]


def test_numbers_are_told_where_there_is_room():
    assert len(texts(similarity(np.ones((12, 12))))) == 144
    assert texts(similarity(np.ones((13, 13)))) == []
    small = Figure(figsize=(2, 2)).add_subplot()
    assert similarity(np.ones((12, 12)), ax=small) and not small.texts


def test_numbers_are_seen_on_their_colours():
    figure = similarity([[0.0, 1.0]])
    assert [text.get_color() for text in figure.axes[0].texts] == ["white", "black"]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_any_matrix_is_drawn(high, wide):
    figure = similarity(torch.rand(high, wide))
    assert figure.axes[0].images[0].get_array().shape == (high, wide) and png(figure)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((torch.ones(3),), r"matrix must be rows × columns, not of shape \[3\]"),
        ((torch.ones(2, 3), ["a"]), "rows must have 2 names to fit the matrix, not 1"),
        ((torch.ones(2, 3), None, ["a"]), "columns must have 3 names"),
    ],
)
def test_refuses_what_does_not_fit(arguments, said):
    with pytest.raises(ValueError, match=said):
        similarity(*arguments)


def test_a_sweep_has_a_bar_for_each_site():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)).eval()
    found = torchhook.sweep(model, torch.randn(2, 4), "?", torchhook.edits.zero, torch.sum, progress=False)
    figure = sweep(found)
    assert rows(figure) == ["0 (Linear)", "1 (Linear)", "2 (Linear)"]
    bars = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in figure.axes[0].patches}
    assert bars == pytest.approx({row: one.change for row, one in enumerate(found)}) and png(figure)
    assert rows(sweep(found.best(1))) == [found.best(1)[0].place]


def test_a_sweep_with_a_clean_run_shows_what_comes_back():
    made = [
        SweepRow(Site("a"), 1.0, 0.5, 0.25),
        SweepRow(Site("b", "input"), 1.0, 0.5, -0.1),
        SweepRow(Site("c"), 1.0, math.nan, math.nan),
    ]
    figure = sweep(Sweep(made, 0.5, 2.5))
    assert sorted(bar.get_width() for bar in figure.axes[0].patches) == [-0.1, 0.25]
    assert rows(figure) == ["a output", "b input", "c output"]
    assert sorted(legend(figure)) == ["makes worse", "not finite", "recovers"]


def test_a_sweep_in_which_nothing_changes_is_drawn():
    assert png(sweep([SweepRow(Site(""), 1.0, 0.0, None)]))


def test_refuses_what_is_no_sweep():
    with pytest.raises(TypeError, match="table must be the result of torchhook.sweep"):
        sweep([{"path": "a"}])
    with pytest.raises(ValueError, match="table is empty"):
        sweep(Sweep([], 0.0, None))


def test_a_sweep_of_positions_is_drawn_as_site_by_position():
    shares = {"a": (0.1, -0.9, 0.4), "b": (math.nan, 0.2)}
    made = [SweepRow(Site(path), 1.0, 0.5, one, at) for path, some in shares.items() for at, one in enumerate(some)]
    figure = sweep(Sweep(made, 0.5, 2.5), tokens=["the", "cat", "sat"])
    ax, bar = figure.axes
    painted = ax.images[0].to_rgba(ax.images[0].get_array())
    assert rows(figure) == ["a", "b"] and painted.shape[:2] == (2, 3) and png(figure)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["the", "cat", "sat"]
    assert bar.get_ylabel() == "recovered share" and bar.get_ylim() == pytest.approx((-0.9, 0.9))
    assert painted[0, 1, 2] > painted[0, 1, 0] and painted[0, 2, 0] > painted[0, 2, 2]  # blue below zero, red above
    assert legend(figure) == ["not finite", "not measured", "negative"]
    broken, missing, _ = ax.collections
    assert to_hex(broken.get_facecolor()[0]) == NONFINITE and broken.get_paths()[0].vertices.min(0).tolist() == [
        -0.5,
        0.5,
    ]
    assert to_hex(missing.get_facecolor()[0]) == UNMEASURED and missing.get_paths()[0].vertices.min(0).tolist() == [
        1.5,
        0.5,
    ]


def test_names_of_positions_must_fit():
    one = SweepRow(Site("a"), 1.0, 0.5, None, 0)
    with pytest.raises(ValueError, match="tokens must have 1 names, one per position, not 2"):
        sweep([one], tokens=["a", "b"])
    with pytest.raises(ValueError, match="tokens names positions, but the sweep has none"):
        sweep([one._replace(position=None)], tokens=["a"])


DRAWN = {
    "attention": lambda **place: plot.attention(torch.rand(4, 6, 6), tokens="abcdef", **place),
    "cam": lambda **place: plot.cam(torch.rand(3, 8, 8), torch.rand(2, 2), **place),
    "distributions": lambda **place: plot.distributions(chain(3), "ridge", **place),
    "feature_maps": lambda **place: plot.feature_maps(torch.rand(4, 6, 6), **place),
    "gradient_flow": lambda **place: plot.gradient_flow(chain(3, grads=True), **place),
    "layer_heatmap": lambda **place: plot.layer_heatmap(Series([0, 1], ["a"], torch.rand(1, 2)), **place),
    "similarity": lambda **place: plot.similarity(torch.rand(3, 3), **place),
    "sweep": lambda **place: plot.sweep([SweepRow(Site("a"), 1.0, 0.5, None)], **place),
}


def test_every_still_is_tried_here():
    assert sorted(DRAWN) == plot.__all__ == sorted(plot.__all__)


@pytest.mark.parametrize("name", DRAWN)
def test_a_notebook_shows_a_figure_of_its_own(name):
    figure = DRAWN[name]()
    shown, _ = DisplayFormatter().format(figure)
    assert isinstance(figure, Figure) and shown["image/png"][:4] == b"\x89PNG"


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("layout", [None, "constrained", "tight"])
def test_a_place_that_is_given_is_drawn_in(name, layout):
    figure = Figure(layout=layout)
    axes = figure.subplots(1, 2)
    assert DRAWN[name](ax=axes[1]) is figure
    assert axes[1].has_data() and not axes[0].has_data() and png(figure)


@pytest.mark.parametrize("name", DRAWN)
def test_a_place_may_be_in_another_or_in_a_part_of_a_figure(name):
    figure = Figure()
    part = figure.subfigures(1, 2)[0].subplots()
    assert DRAWN[name](ax=part) is figure
    assert DRAWN[name](ax=part.inset_axes([0.5, 0.5, 0.4, 0.4])) is figure and png(figure)


def test_refuses_what_is_no_place():
    with pytest.raises(TypeError, match=r"ax must be a single matplotlib Axes, such as axes\[0, 0\] .* not ndarray"):
        similarity([[1.0]], ax=Figure().subplots(2, 2))


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_drawn_letter_by_letter(name):
    def drawn(text, **options):
        figure = Figure(figsize=(3, 1))
        figure.add_artist(Text(0.1, 0.5, text, figure=figure, **options))
        return png(figure)

    literal = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in name)
    assert drawn(label(name)) == drawn(literal, parse_math=False)


def test_needs_no_display_and_leaves_nothing_behind():
    script = (
        "import sys, torch, torchhook\n"
        "assert 'torchhook.plot' not in sys.modules\n"
        "torchhook.plot\n"
        "assert 'matplotlib' not in sys.modules\n"
        "torchhook.plot.feature_maps(torch.rand(2, 3, 3))._repr_png_()\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    environment = {"PATH": "", "HOME": "/nonexistent", "MPLBACKEND": "tkagg", "MPLCONFIGDIR": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DRAWN)
def test_without_matplotlib_the_extra_is_named(name, monkeypatch):
    for module in [known for known in sys.modules if known.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'a plot needs matplotlib: pip install "torchhook\[plot\]"'):
        DRAWN[name]()
