"""Values of layers themselves: their distribution, and a map of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchhook.render.figures.style import layer_name, new_figure, quiet
from torchhook.render.palette import BLUE, DIVERGING, SEQUENTIAL

_ROW, _MOST = 22, 1400  # pixels: height of a row, greatest height of the figure
_LONGEST = 28  # characters of a name beside the axis


def boxes(quantiles: Mapping[str, Sequence[float]], title: str) -> Any:
    """The distribution in each layer, the first on top: whiskers from 1 % to 99 %, a box from 25 % to 75 %, the median.

    Args:
        quantiles: By layer, the values below which 1, 25, 50, 75 and 99 % of its values are.
        title: What the values are.

    >>> boxes({"fc": [-2.0, -1.0, 0.0, 1.0, 2.0]}, "output").data[0].median
    (0.0,)
    """
    if not quantiles:
        return None
    low, left, middle, right, high = (list(ends) for ends in zip(*quantiles.values(), strict=True))
    figure = new_figure().add_box(
        y=[layer_name(path) for path in quantiles],
        lowerfence=low,
        q1=left,
        median=middle,
        q3=right,
        upperfence=high,
        orientation="h",
        line={"color": BLUE, "width": 1.5},
        hoverinfo="x",
    )
    figure.update_xaxes(title_text=title)
    quiet(figure, height=min(_MOST, 110 + _ROW * len(quantiles)))
    named = list(quantiles)[:: math.ceil(len(quantiles) * _ROW / _MOST)]
    return figure.update_yaxes(
        autorange="reversed",
        type="category",
        tickvals=[layer_name(path) for path in named],
        ticktext=[layer_name(path, _LONGEST) for path in named],
    )


def plane(rows: Sequence[Sequence[float | None]], unit: str) -> Any:
    """A map, the first row on top, in colours of one scale: from zero up, or symmetric around zero.

    >>> plane([[0.0, 2.0], [1.0, None]], "mean").data[0].zmax
    2.0
    """
    known = [value for row in rows for value in row if value is not None]
    signed, most = any(value < 0 for value in known), max(map(abs, known), default=0.0) or 1.0
    figure = new_figure().add_heatmap(
        z=[list(row) for row in rows],
        zmin=-most if signed else 0.0,
        zmax=most,
        colorscale=DIVERGING if signed else SEQUENTIAL,
        colorbar={"title": {"text": unit, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate="x %{x}, y %{y}: %{z:.4g}<extra></extra>",
    )
    quiet(figure, height=280)
    figure.update_xaxes(title_text="x (positions)", constrain="domain")
    return figure.update_yaxes(title_text="y (positions)", autorange="reversed", scaleanchor="x", constrain="domain")
