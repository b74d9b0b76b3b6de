"""The distribution of values in each layer, from its histogram: as boxes or as ridges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchhook.core.optional import require
from torchhook.plot.sources import classes_of, readings
from torchhook.plot.style import (
    legend_above,
    mark_odd,
    name_layers,
    place,
    quiet,
    rows_page,
)
from torchhook.render.palette import BLUE, ZERO
from torchhook.stats.histogram import Bins
from torchhook.stats.reading import Reading, Snapshot
from torchhook.stats.result import Stats
from torchhook.training.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDE = 100.0  # ratio of the largest to the smallest scale of a layer from which the axis is logarithmic
_DECADES = 6  # powers of ten on each side of zero, at most
_CELLS = 120  # along the axis: narrower bins are drawn together
_OVERLAP = 1.25  # height of a ridge, in rows
_MANY = 100  # rows from which lines are thinner


class _Distribution(NamedTuple):
    """The values of a layer: bins, quantiles for whisker, box and median, and whether some are not finite."""

    bins: Bins
    quantiles: tuple[float, ...]
    broken: bool

    @property
    def scale(self) -> float:
        """How far from zero the whiskers reach."""
        return max(abs(self.quantiles[0]), abs(self.quantiles[-1]))


def distributions(
    stats: Stats | Snapshot | Run,
    kind: Literal["box", "ridge"] = "box",
    port: str = "output",
    *,
    ax: Axes | None = None,
) -> Figure:
    """The distribution of values by layer, in execution order; needs ``measure(..., stats=("histogram", …))``.

    A box covers the middle half of the values, with a line at the median and a whisker from 1 % to 99 %. A ridge is
    their density, scaled to the same height in every layer; zeros are a separate orange line, whose height is their
    share. If the scales of the layers are very different, the axis is logarithmic on both sides of zero. A cross at the
    right marks a layer with values that are not finite. Of a run, the last window with histograms is drawn.

    >>> from torch import nn, randn
    >>> from torchhook import measure
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> with measure(model, stats=("moments", "histogram")) as found:
    ...     _ = model(randn(64, 4))
    >>> [tick.get_text() for tick in distributions(found, kind="ridge").axes[0].get_yticklabels()]
    ['0', '1']
    """
    if kind not in _KINDS:
        raise ValueError(f"kind must be 'box' or 'ridge', not {kind!r}")
    found = readings(stats, port, "histogram")
    layers = [_distribution(reading) for reading in found.values()]
    figure, ax = place(ax, *rows_page(len(layers)))
    name_layers(ax, list(found), classes_of(stats))
    _set_scale(ax, [layer for layer in layers if len(layer.bins.counts)])
    _KINDS[kind](ax, layers)
    mark_odd(ax, [row for row, layer in enumerate(layers) if layer.broken], "some not finite")
    ax.set_xlabel(f"{port} value")
    quiet(ax)
    legend_above(ax)
    return figure


def _distribution(reading: Reading) -> _Distribution:
    bins, broken = reading.histogram(), False
    if "moments" in reading:  # moments have the exact extremes
        bins, broken = Bins(bins.edges.clamp(reading.min, reading.max), bins.counts), reading.nonfinite > 0
    quantiles = tuple(bins.quantile(q) for q in (0.01, 0.25, 0.5, 0.75, 0.99))
    return _Distribution(bins, quantiles, broken or not len(bins.counts))


def _set_scale(ax: Axes, layers: Sequence[_Distribution]) -> None:
    """A linear or symmetric-log axis that shows the whiskers of all layers."""
    scales = [layer.scale for layer in layers if layer.scale > 0] or [1.0]
    if max(scales) > _WIDE * min(scales):
        least = max(min(scales), max(scales) * 10.0**-_DECADES)
        ax.set_xscale("symlog", linthresh=10.0 ** math.floor(math.log10(least)))
    ends = [end for layer in layers for end in (layer.quantiles[0], layer.quantiles[-1])] or [0.0]
    low, high = _shown(ax, [min(*ends, 0.0), max(*ends, 0.0)]).tolist()
    margin = 0.04 * (high - low) or 1.0
    ax.set_xlim(*_values(ax, [low - margin, high + margin]))


def _boxes(ax: Axes, layers: Sequence[_Distribution]) -> None:
    rows = [row for row, layer in enumerate(layers) if len(layer.bins.counts)]
    if not rows:
        return
    low, left, middle, right, high = zip(*(layers[row].quantiles for row in rows), strict=True)
    thin = 1.0 if len(layers) <= _MANY else 0.5
    ax.hlines(rows, low, high, color=BLUE, linewidth=thin, label="1 % to 99 %")
    widths = [end - start for start, end in zip(left, right, strict=True)]
    ax.barh(rows, widths, left=left, height=0.6, color=BLUE, alpha=0.5, label="25 % to 75 %")
    halves = [row - 0.3 for row in rows], [row + 0.3 for row in rows]
    ax.vlines(middle, *halves, color=ax.spines["left"].get_edgecolor(), linewidth=1.5, label="median")


def _ridges(ax: Axes, layers: Sequence[_Distribution]) -> None:
    ridges = [_ridge(ax, layer) for layer in layers]
    outlines = [[(x, row - _OVERLAP * height) for x, height in ridge] for row, ridge in enumerate(ridges) if ridge]
    collection, edge = require("matplotlib.collections", "plot").PolyCollection, 0.5 if len(layers) <= _MANY else 0.0
    style = {"facecolor": BLUE, "edgecolor": ax.get_facecolor(), "linewidth": edge, "alpha": 0.8}
    ax.add_collection(collection(outlines, label="density", **style), autolim=False)
    zeros = {row: share for row, layer in enumerate(layers) if (share := _share_of_zeros(layer.bins))}
    if zeros:
        tops = [row - share for row, share in zeros.items()]
        lines = [0.0] * len(zeros), list(zeros), tops
        ax.vlines(*lines, color=ax.get_facecolor(), linewidth=10 * edge or 2)  # a gap, which shows in grey, too
        ax.vlines(*lines, color=ZERO, linewidth=6 * edge or 1, label="share of zeros")
    ax.set_ylim(len(layers) - 0.7, -_OVERLAP - 0.1)


def _ridge(ax: Axes, layer: _Distribution) -> list[tuple[float, float]]:
    """The outline of the density of all non-zero values, on the scale of the axis; its height is 1."""
    counts = layer.bins.counts.masked_fill(_is_zero(layer.bins), 0)
    count = int(counts.sum())
    if not count:
        return []
    low, high = _shown(ax, ax.get_xlim()).tolist()
    left, right = _shown(ax, (layer.quantiles[1], layer.quantiles[3])).tolist()
    # The rule of Freedman and Diaconis: so many values cannot resolve narrower bins.
    width = max((high - low) / _CELLS, 2 * (right - left) / count ** (1 / 3))
    edges = _shown(ax, layer.bins.edges)
    edges = torch.cat(
        [edges[:1] - width / 2, edges[1:-1], edges[-1:] + width / 2]
    )  # so that a single value is visible, too
    cells = (edges / width).floor()
    kept = torch.cat([cells.new_ones(1), cells.diff()[:-1], cells.new_ones(1)]) > 0
    below = torch.cat([counts.new_zeros(1), counts.cumsum(0)])[kept]
    density = below.diff() / edges[kept].diff()
    middles = (edges[kept][1:] + edges[kept][:-1]) / 2
    values = _values(ax, torch.cat([edges[:1], middles, edges[-1:]]))
    return list(zip(values, [0.0, *(density / density.max()).tolist(), 0.0], strict=True))


def _share_of_zeros(bins: Bins) -> float:
    return float(bins.counts[_is_zero(bins)].sum() / bins.counts.sum().clamp(min=1))


def _is_zero(bins: Bins) -> Tensor:
    """Which bins hold zeros: those that end at zero; beside zeros they hold only denormal numbers."""
    return (bins.edges[:-1] == 0) | (bins.edges[1:] == 0)


def _shown(ax: Axes, values: Sequence[float] | Tensor) -> Tensor:
    """The positions of values along the axis."""
    return torch.as_tensor(ax.xaxis.get_transform().transform(torch.as_tensor(values, dtype=torch.float64).numpy()))


def _values(ax: Axes, shown: Sequence[float] | Tensor) -> list[float]:
    """The values at positions along the axis."""
    places = torch.as_tensor(shown, dtype=torch.float64).numpy()
    values: list[float] = ax.xaxis.get_transform().inverted().transform(places).tolist()
    return values


_KINDS: dict[str, Any] = {"box": _boxes, "ridge": _ridges}
