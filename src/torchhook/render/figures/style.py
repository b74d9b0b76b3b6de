"""How every figure looks: one palette, transparent paper, quiet axes; the page around it sets the colours of text."""

from __future__ import annotations

import html
import math
from importlib import import_module
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, told apart by colour-blind readers too; these hold on light and on dark paper.
BLUE, GREEN, ORANGE, VERMILLION, GREY = "#0072b2", "#009e73", "#e69f00", "#d55e00", "#8a9099"
SEVERITY = {"info": BLUE, "warning": ORANGE, "error": VERMILLION}

# What draws figures in a browser: plotly.js 4.1.1 with the kinds of plots that are on an x and a y axis, as npm has it
# in plotly.js-cartesian-dist-min. The whole of plotly.js is three times as long to load, and our pages need no more.
SCRIPT = Path(__file__).with_name("plotly-cartesian.min.js")


def plotly(module: str) -> Any:
    """A module of plotly.

    >>> plotly("graph_objects").__name__
    'plotly.graph_objects'
    """
    try:
        return import_module(f"plotly.{module}")
    except ImportError as error:
        raise ImportError('plots need plotly: pip install "torchhook[plot]"') from error


def label(name: str) -> str:
    """A name to be shown as it is: plotly reads tags and links in what it draws.

    >>> label("<a href='//x'>fc</a>")
    "&lt;a href='//x'&gt;fc&lt;/a&gt;"
    """
    return html.escape("".join(filter(str.isprintable, name)), quote=False)


def is_number(value: Any) -> bool:
    """Whether there is a number to draw, which a NaN is not.

    >>> is_number(0.5), is_number(None), is_number(math.nan)
    (True, False, False)
    """
    return isinstance(value, (int, float)) and math.isfinite(value)


def quiet(figure: Any, height: int) -> Any:
    """`figure` in the style of all; dragging is left to the page, which a thumb scrolls."""
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
        showlegend=False,
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
