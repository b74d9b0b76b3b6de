"""The look of every plot: figure and axes, colour scales, names along an axis, legend."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from torchhook.core.optional import require
from torchhook.plot.arrays import share_below
from torchhook.render.palette import DIVERGING, GREY, NONFINITE, QUIET, SEQUENTIAL, UNMEASURED, ZERO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

ODD: dict[str, tuple[str, str]] = {
    "zero": (ZERO, "xxxx"),
    "not finite": (NONFINITE, "////"),
    "not measured": (UNMEASURED, "...."),
    "negative": ("none", "\\\\\\"),
}
"""The colour and the hatches of cells without a colour on the scale, and of those whose sign grey paper hides."""

SMALL = 8  # points: names, and text beside a plot
_HATCHED = 4000  # cells of a heat map up to which there is room for hatches
_LONGEST = 32  # characters of a name
_PITCH = 0.16  # inches from one name to the next
_NARROW = 4.0  # inches: narrower plots have one legend entry per line
_PAGE, _LONG_PAGE = 9.0, 12.0  # inches: the greatest height of a figure, and of one with named rows


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, with its size in inches.

    >>> float(new_figure(6, 4).get_figwidth())
    6.0
    """
    require("matplotlib.figure", "plot", "a plot")
    from torchhook.plot.still import Still

    return Still(figsize=(width, height), layout="constrained")


def place(ax: Axes | None, width: float, height: float) -> tuple[Figure, Axes]:
    """The figure and the axes to draw in: `ax`, or the axes of a new figure, with its size in inches.

    >>> figure, ax = place(None, 6, 4)
    >>> place(ax, 3, 3) == (figure, ax)
    True
    """
    if ax is None:
        figure = new_figure(width, height)
        return figure, figure.add_subplot()
    if not isinstance(ax, require("matplotlib.axes", "plot", "a plot").Axes):
        raise TypeError(
            f"ax must be a single matplotlib Axes, such as axes[0, 0] of plt.subplots(2, 2), not {type(ax).__name__}"
        )
    root = ax.get_figure(root=True)
    if root is None:
        raise ValueError("ax has no figure: it was removed from its figure")
    return root, ax


def page(shape: tuple[int, int], width: float, beside: float = 0.0) -> tuple[float, float]:
    """The size in inches of a figure for an image of height × width pixels, about `width` inches wide.

    >>> page((100, 200), 6), page((100, 200), 6, beside=1)
    ((6.0, 3.4), (7.0, 3.4))
    """
    high, wide = shape
    width = min(_PAGE, max(4.0, width))
    height = width * high / wide + 0.4  # for a title
    shrunk = min(1.0, _PAGE / height)
    return max(3.0, width * shrunk) + beside, height * shrunk


def rows_page(rows: int) -> tuple[float, float]:
    """The size of a figure with named rows."""
    return 8.0, min(_LONG_PAGE, max(2.5, 1.2 + 0.2 * rows))


def colours(signed: bool) -> Colormap:
    """Blue to red through white for numbers of both signs, otherwise viridis; what is not finite stands out in both."""
    name = DIVERGING if signed else SEQUENTIAL
    found: Colormap = require("matplotlib", "plot").colormaps[name].with_extremes(bad=NONFINITE)
    return found


def mark_cells(ax: Axes, cells: Mapping[str, Tensor], edges: Sequence[float]) -> None:
    """Mark cells of a heat map, by what they are in `ODD`: in a colour and hatched, so that it shows in grey, too.

    `edges` are those of the columns. Neighbours in a row are drawn as one.
    """
    for meaning, chosen in cells.items():
        colour, hatch = ODD[meaning]
        is_hatched = chosen.numel() <= _HATCHED
        if colour == "none" and not is_hatched:
            continue
        edge = GREY if colour == "none" else ax.get_facecolor()
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": edge, "linewidth": 0}
        style["hatch"] = hatch if is_hatched else None
        names = iter([meaning])  # for the legend, once
        ends = F.pad(chosen.int(), (1, 1)).diff()  # 1 where a stretch begins, -1 after its end
        for row in chosen.any(1).nonzero().flatten().tolist():
            first, last = ((ends[row] == end).nonzero().flatten().tolist() for end in (1, -1))
            spans = [(edges[start], edges[end] - edges[start]) for start, end in zip(first, last, strict=True)]
            ax.broken_barh(spans, (row - 0.5, 1.0), label=next(names, None), rasterized=True, **style)
    legend_above(ax)


def colour_scale(values: Tensor) -> Any:
    """One scale of colours for all values: from zero up, or symmetric around zero."""
    signed, most = bool((values < 0).any()), share_below(values.abs(), 1.0) or 1.0
    return require("matplotlib.cm", "plot").ScalarMappable(
        norm=require("matplotlib.colors", "plot").Normalize(-most if signed else 0.0, most), cmap=colours(signed)
    )


def colour_bar(ax: Axes, scale: Any, title: str = "") -> None:
    """Add a colour bar."""
    bar = place(ax, 0, 0)[0].colorbar(scale, ax=ax, shrink=0.7)
    bar.set_label(label(title), fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL)


def label(name: object) -> str:
    r"""A name as plain text, without formulas between dollar signs. Long names lose their beginning: the end says more.

    >>> print(label("$x^2$"), label("fc\x1b[31m"), label("encoder." * 9 + "fc"))
    \$x^2\$ fc\x1b[31m …oder.encoder.encoder.encoder.fc
    """
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(name))
    return (text if len(text) <= _LONGEST else f"…{text[1 - _LONGEST :]}").replace("$", r"\$")


def name_rows(ax: Axes, names: Sequence[object]) -> None:
    """Name rows 0, 1, … at the left, the first on top; as many as fit."""
    chosen = thinned(len(names), inches(ax)[1])
    ax.set_yticks(chosen, [label(names[row]) for row in chosen], fontsize=SMALL)
    ax.set_ylim(len(names) - 0.5, -0.5)


def name_layers(ax: Axes, paths: Sequence[str], classes: Mapping[str, str] | None = None) -> None:
    """Name rows by module paths at the left, the empty one is the model itself, and by classes at the right."""
    name_rows(ax, [path or "the model" for path in paths])
    ax.set_ylabel("layer", fontsize=SMALL)
    for row in thinned(len(paths), inches(ax)[1]) if classes else ():
        name, across = label((classes or {}).get(paths[row], "")), ax.get_yaxis_transform()
        ax.text(1.02, row, name, transform=across, color=QUIET, fontsize=SMALL, va="center", clip_on=False)


def name_columns(ax: Axes, names: Sequence[object]) -> None:
    """Name columns below the axis, vertically."""
    chosen = thinned(len(names), inches(ax)[0])
    ax.set_xticks(chosen, [label(names[column]) for column in chosen], fontsize=SMALL, rotation=90)


def thinned(count: int, room: float) -> range:
    """Which of `count` names to show so that they fit into `room` inches.

    >>> list(thinned(5, 4.0)), list(thinned(100, 0.5))
    ([0, 1, 2, 3, 4], [0, 34, 68])
    """
    return range(0, count, max(1, math.ceil(count / max(1, int(room / _PITCH)))))


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes."""
    size, dpi = ax.get_window_extent(), place(ax, 0, 0)[0].dpi
    return size.width / dpi, size.height / dpi


def quiet(ax: Axes) -> None:
    """Vertical grid lines, no box."""
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="x", color=GREY, alpha=0.3, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=SMALL)
    ax.xaxis.label.set_fontsize(SMALL)


def mark_odd(ax: Axes, rows: Sequence[int], meaning: str) -> None:
    """Mark rows whose value has no place on the axis: a zero at its left end, what is not finite at its right end."""
    marker, where, colour = ("<", 0.0, ZERO) if meaning == "zero" else ("x", 1.0, NONFINITE)
    if rows:
        ends, across = [where] * len(rows), ax.get_yaxis_transform()
        ax.scatter(ends, rows, s=28, color=colour, marker=marker, label=meaning, transform=across, clip_on=False)


def legend_above(ax: Axes) -> None:
    """Put the legend above the plot, where it hides nothing."""
    columns = 4 if inches(ax)[0] > _NARROW else 1
    if ax.get_legend_handles_labels()[1]:
        ax.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, frameon=False, fontsize=SMALL, borderaxespad=0.2
        )
