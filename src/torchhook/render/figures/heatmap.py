"""One statistic of every layer at every step, as colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torchhook.render.figures.style import layer_name, new_figure, quiet
from torchhook.render.palette import DIVERGING, SEQUENTIAL

_SIGNED = ("mean", "min", "max", "skewness")
_LINEAR = (*_SIGNED, "zero_fraction", "nonfinite", "nan", "posinf", "neginf", "count")  # others go on a log scale
_ROW, _LEAST, _MOST = 14, 320, 1400  # pixels: height of a row, least and greatest height of the figure
_LONGEST = 28  # characters of a name beside the axis

Rows = Sequence[Sequence[float | None]]


def heatmap(field: str, steps: Sequence[int], paths: Sequence[str], rows: Rows) -> Any:
    """Layers × steps. Each row of the data is a step, so that a live page can append new ones.

    >>> heatmap("std", [0, 10], ["conv", "fc"], [[1.0, 0.1], [10.0, 0.0]]).data[0].z
    ([0.0, -1.0], [1.0, None])
    """
    name = field if field in _LINEAR else f"log₁₀ {field}"
    figure = new_figure().add_heatmap(
        x=list(steps),
        y=[layer_name(path) for path in paths],
        z=heatmap_rows(field, rows),
        transpose=True,
        colorscale=DIVERGING if field in _SIGNED else SEQUENTIAL,
        zmid=0 if field in _SIGNED else None,
        colorbar={"title": {"text": name, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate=f"%{{y}}<br>step %{{x}}<br>{name} %{{z}}<extra></extra>",
    )
    figure.update_xaxes(title_text="step")
    quiet(figure, height=min(_MOST, max(_LEAST, 90 + _ROW * len(paths))))
    most = (_MOST - 90) // _ROW
    named = paths[:: -(-len(paths) // most) or 1]
    return figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        type="category",
        tickmode="array",
        tickvals=[layer_name(path) for path in named],
        ticktext=[layer_name(path, _LONGEST) for path in named],
    )


def heatmap_rows(field: str, rows: Rows) -> list[list[float | None]]:
    """What is drawn of `rows`: the values themselves, or their decimal logarithms where there are any."""
    return [list(row) if field in _LINEAR else [_log(value) for value in row] for row in rows]


def _log(value: float | None) -> float | None:
    return float(f"{math.log10(value):.4g}") if value is not None and value > 0 else None
