"""The look of every figure: transparent background, quiet axes. The page around it sets the colour of the text."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from typing import Any

from torchhook.core.optional import require
from torchhook.render.palette import BLACK, GREY, NONFINITE, SEQUENTIAL, UNMEASURED, WHITE, ZERO

ODD = {"zero": ZERO, "not finite": NONFINITE, "not measured": UNMEASURED}
"""Values without a place on a scale, by their name in the legend; `odd_kind` says which a value is."""

LONG = 6  # times the usual gap between two measurements: then nothing is drawn between them
LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}  # above the plot

# The script that draws figures in a browser: plotly.js 4.1.1 with the cartesian plot types only, from the npm package
# plotly.js-cartesian-dist-min. The full plotly.js takes three times as long to load.
SCRIPT = Path(__file__).with_name("plotly-cartesian.min.js")


def new_figure(rows: int = 1, **options: Any) -> Any:
    """An empty plotly figure with one plot per row.

    >>> new_figure().data
    ()
    """
    return require("plotly.graph_objects", "plot", "a figure").Figure().set_subplots(rows=rows, **options)


def not_measured(text: str = "not measured") -> Any:
    """A figure that says why there is nothing to show; empty axes would look like a bug."""
    figure = quiet(new_figure().add_scatter(x=[], y=[]), height=300)
    figure.update_xaxes(visible=False).update_yaxes(visible=False)
    return figure.add_annotation(text=text, showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")


def label(name: str) -> str:
    """A name as plain text: plotly interprets tags and links in what it draws.

    >>> label("<a href='//x'>fc</a>")
    "&lt;a href='//x'&gt;fc&lt;/a&gt;"
    """
    return html.escape("".join(filter(str.isprintable, name)), quote=False)


def layer_name(path: str, longest: int | None = None) -> str:
    """The label of a layer; only the end of a path that is longer than `longest`, because the end says more.

    >>> layer_name(""), layer_name("encoder.layers.0.fc", longest=8)
    ('the model', '…rs.0.fc')
    """
    cut = longest is not None and len(path) > longest
    return label(f"…{path[1 - (longest or 0) :]}" if cut else path) or "the model"


def is_number(value: Any) -> bool:
    """Whether `value` is a finite number, so that it can be drawn.

    >>> is_number(0.5), is_number(None), is_number(math.nan)
    (True, False, False)
    """
    return isinstance(value, (int, float)) and math.isfinite(value)


def usual_gap(steps: Sequence[int]) -> int:
    """How far apart steps usually are.

    >>> usual_gap([0, 10, 20, 500]), usual_gap([3])
    (10, 1)
    """
    return median_high([later - step for step, later in pairwise(steps)] or [1])


def odd_kind(value: float | None, log: bool = True) -> str | None:
    """The name in `ODD` of a value that has no place on the axis; None if it has one.

    >>> odd_kind(0.0), odd_kind(0.0, log=False), odd_kind(math.nan), odd_kind(None)
    ('zero', None, 'not finite', 'not measured')
    """
    if value is None:
        return "not measured"
    if not math.isfinite(value):
        return "not finite"
    return "zero" if log and value <= 0 else None


def shade(share: float) -> str:
    """A colour of the sequential scale, from 0 to 1.

    >>> shade(0.0), shade(1.0)
    ('rgb(68, 1, 84)', 'rgb(253, 231, 37)')
    """
    colours = require("plotly.colors", "plot", "a figure").sample_colorscale(SEQUENTIAL, share)
    return str(colours[0])


def ink_on(fill: str) -> str:
    """Black or white, whichever can be read on a colour.

    >>> ink_on("rgb(240, 228, 66)") == BLACK, ink_on("rgb(68, 1, 84)") == WHITE
    (True, True)
    """
    parts = [int(fill[at : at + 2], 16) for at in (1, 3, 5)] if fill[0] == "#" else map(int, fill[4:-1].split(","))
    light = sum(weight * (part / 255) ** 2.2 for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))
    return BLACK if light > 0.18 else WHITE


def quiet(figure: Any, height: int) -> Any:
    """Style `figure`. Dragging scrolls the page instead of zooming; an update of the figure keeps what was toggled."""
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 28, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": GREY},
        hoverlabel={"align": "left", "font": {"family": "system-ui, sans-serif", "size": 12}},
        hovermode="closest",
        dragmode=False,
        minreducedwidth=180,  # on a phone, the beginnings of long names give way to the plot
        showlegend=False,
        uirevision="same",
    )
    axis = {
        "gridcolor": "rgba(138,144,153,.25)",
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        "title_font_size": 12,
    }
    figure.update_xaxes(**axis, showgrid=False, tickfont_size=11)
    figure.update_yaxes(**axis, exponentformat="e", nticks=6, minexponent=1, tickfont_size=11)
    return figure
