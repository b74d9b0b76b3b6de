"""Plots by layer, the first layer on top: gradient flow, and a statistic over the steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchhook.core.errors import NotRecordedError
from torchhook.core.findings import Report
from torchhook.core.optional import require
from torchhook.plot.arrays import finite, numbers, reach, share_below
from torchhook.plot.sources import classes_of, drawn_step, paths_with, snapshot_of
from torchhook.plot.style import (
    SMALL,
    colour_bar,
    colours,
    legend_above,
    mark_cells,
    mark_odd,
    name_layers,
    place,
    quiet,
    rows_page,
)
from torchhook.render.palette import BLUE, ORANGE
from torchhook.rules.check import layers_of
from torchhook.stats.reading import Snapshot
from torchhook.stats.result import Stats
from torchhook.training.runs import Run
from torchhook.training.runs.fields import require_field
from torchhook.training.runs.queries import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 100.0  # ratio of the largest to the smallest value from which the scale is logarithmic

_GRADIENTS = ("grad_output", "param_grad_norm", "param_grad")
_COUNTS = ("nonfinite", "nan", "posinf", "neginf", "count")
_WITH_ZERO = ("mean", "min", "max", "skewness", "zero_fraction", *_COUNTS)  # whose zeros do not mean: nothing flows
_TITLES = {
    "std": "standard deviation",
    "l2": "L2 norm",
    "abs_mean": "mean of absolute values",
    "zero_fraction": "share of zeros",
    "nonfinite": "values that are not finite",
}

Sizes = list[tuple[str, float]]
"""Pairs of layer and gradient size; a layer may occur more than once."""


def gradient_flow(stats: Stats | Snapshot | Report | Run, *, ax: Axes | None = None) -> Figure:
    """The size of the gradients by layer, in execution order, on a log scale; a straight column is healthy.

    Circles are gradients of a layer's output (``measure(..., grads=True)``), squares those of its parameters
    (``param_grads=True``). Zeros are triangles at the left, values that are not finite crosses at the right. Of a run,
    the last window with gradients is drawn, whose step is named.

    >>> from torch import nn, ones
    >>> from torchhook import measure
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> with measure(model, grads=True, param_grads=True) as stats:
    ...     model(ones(8, 4)).sum().backward()
    >>> [tick.get_text() for tick in gradient_flow(stats).axes[0].get_yticklabels()]
    ['0', '1', '2']
    """
    outputs, parameters, kind = _of_report(stats) if isinstance(stats, Report) else _of_stats(stats)
    rows = {layer: row for row, layer in enumerate(dict.fromkeys(layer for layer, _ in outputs + parameters))}
    figure, ax = place(ax, *rows_page(len(rows)))
    ax.set_xscale("log")
    name_layers(ax, list(rows), _classes(stats))
    size = 5 if len(rows) <= 100 else 3
    _points(ax, rows, outputs, label="output gradient (RMS)", marker="o", color=BLUE, markersize=size, linewidth=1)
    style = {"marker": "s", "color": ORANGE, "markersize": size - 1, "linewidth": 0}
    _points(ax, rows, parameters, label=f"parameter gradient ({kind})", **style)
    both = outputs + parameters
    mark_odd(ax, [rows[layer] for layer, value in both if value == 0], "zero")
    mark_odd(ax, [rows[layer] for layer, value in both if not math.isfinite(value)], "not finite")
    when = f" at step {drawn_step(stats, *_GRADIENTS):,}" if isinstance(stats, Run) else ""
    ax.set_xlabel(f"gradient size{when} (RMS of outputs, {kind} of parameters)")
    quiet(ax)
    legend_above(ax)
    return figure


def layer_heatmap(run: Run | Series, stat: str = "std", port: str = "output", *, ax: Axes | None = None) -> Figure:
    """One statistic of every layer (rows) at every step (columns), as colours.

    The scale is symmetric around zero if any value is negative, and negative cells are hatched; otherwise it starts at
    zero. It is logarithmic if the values are far apart, and ignores outliers. Layers through which only zeros flow,
    values that are not finite, and steps without a measurement have colours and hatches of their own.

    Args:
        run: A run, or a `Series` such as ``run.series("std", port="param")``, for which `stat` is only the title.
        stat: A field of the moments, such as ``"mean"``, ``"std"`` or ``"zero_fraction"``.

    >>> import torch
    >>> series = Series(steps=[0, 10, 20], paths=["conv", "fc"], values=torch.rand(2, 3))
    >>> layer_heatmap(series).axes[0].collections[0].get_array().shape
    (2, 3)
    """
    steps, paths, values = _series(run, stat, port)
    figure, ax = place(ax, *rows_page(len(paths)))
    known, signed = finite(values), bool((values < 0).any())
    dead = 1 if stat == "zero_fraction" else math.nan if signed or stat in _WITH_ZERO else 0
    is_zero = values == dead
    norm = _norm(known.masked_fill(is_zero, math.nan), is_linear=stat in _WITH_ZERO)
    edges = _edges(steps), [row - 0.5 for row in range(len(paths) + 1)]
    drawn = ax.pcolormesh(*edges, known.numpy(), norm=norm, cmap=colours(signed), rasterized=True)
    name_layers(ax, paths)
    odd = {"zero": is_zero, "not finite": values.isinf(), "not measured": values.isnan(), "negative": values < 0}
    mark_cells(ax, odd, edges[0])
    ax.set_xlabel("step", fontsize=SMALL)
    ax.tick_params(axis="x", labelsize=SMALL)
    colour_bar(ax, drawn, _TITLES.get(stat, stat))
    return figure


def _classes(stats: Stats | Snapshot | Report | Run) -> dict[str, str]:
    if isinstance(stats, Report):
        return {layer["site"]: layer.get("module") or "" for layer in stats.layers}
    return classes_of(stats)


def _of_report(report: Report) -> tuple[Sizes, Sizes, str]:
    outputs, parameters = _split(report.layers)
    if not outputs + parameters:
        raise NotRecordedError("the report has no gradients: diagnose with a loss, or monitor a training")
    return outputs, parameters, "norm"


def _of_stats(stats: Stats | Snapshot | Run) -> tuple[Sizes, Sizes, str]:
    snapshot = snapshot_of(stats, *_GRADIENTS)
    outputs, parameters = _split(layers_of(snapshot))
    if parameters:
        return outputs, parameters, "norm"
    readings = [snapshot[path, "param_grad"] for path in paths_with(snapshot.rows, "param_grad", stat="moments")]
    sizes = [(_layer(one.path), math.nan if one.nonfinite else one.l2 / math.sqrt(one.count)) for one in readings]
    return outputs, sizes[::-1], "RMS"  # the backward pass starts at the last layer


def _split(layers: Sequence[Mapping[str, Any]]) -> tuple[Sizes, Sizes]:
    """Gradients of module outputs, and of parameters under the module that owns them."""
    known = [layer for layer in layers if layer.get("grad_norm") is not None]
    return (
        [(layer["site"], layer["grad_norm"]) for layer in known if layer["kind"] == "module"],
        [(_layer(layer["site"]), layer["grad_norm"]) for layer in known if layer["kind"] == "parameter"],
    )


def _layer(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _points(ax: Axes, rows: Mapping[str, int], sizes: Sizes, **style: Any) -> None:
    shown = [(size, rows[layer]) for layer, size in sizes if 0 < size < math.inf]
    if shown:
        ax.plot([size for size, _ in shown], [row for _, row in shown], **style)


def _series(run: Any, stat: str, port: str) -> Series:
    if isinstance(run, Run):
        require_field(stat, "stat")
        snapshot_of(run, port)  # raises if nothing was measured there
        broken = run.series("nonfinite", port).values > 0
        run = run.series(stat, port)
        if stat not in _COUNTS:  # a number of the finite values alone would hide the others
            run = run._replace(values=run.values.masked_fill(broken, math.inf))
    if not isinstance(run, Series):
        raise TypeError(f"run must be a Run or a Series of one, not {run!r:.80}")
    values = numbers(run.values, "values")
    if tuple(values.shape) != (len(run.paths), len(run.steps)):
        found = f"{list(values.shape)} for {len(run.paths)} paths and {len(run.steps)} steps"
        raise ValueError(f"the values of a Series must be paths × steps, not of shape {found}")
    if values.isnan().all():
        raise NotRecordedError(f"there is no {stat} to draw: no step has a value")
    return Series(run.steps, run.paths, values)


def _norm(values: Tensor, is_linear: bool) -> Any:
    """The scale from values to colours; by powers of ten if they are far apart, unless all of it `is_linear`."""
    colors, most = require("matplotlib.colors", "plot"), reach(values)
    sizes = values[values != 0].abs()
    if bool((values < 0).any()):
        usual, ends = share_below(sizes, 0.5), {"vmin": -most, "vmax": most}
        return colors.SymLogNorm(usual, **ends) if most > _WIDE * usual else colors.Normalize(**ends)
    least = share_below(sizes, 0.01)
    is_wide = most > _WIDE * least > 0 and not is_linear
    return colors.LogNorm(least, most, clip=True) if is_wide else colors.Normalize(0.0, most)


def _edges(steps: Sequence[int]) -> list[float]:
    """The edges of the columns, halfway between one step and the next."""
    between = [(before + after) / 2 for before, after in pairwise(steps)]
    if not between:
        return [steps[0] - 0.5, steps[0] + 0.5]
    return [2 * steps[0] - between[0], *between, 2 * steps[-1] - between[-1]]
