"""The figures of results: numbers by layer, and matrices of layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from torchhook.core.parts import Bars, Matrix
from torchhook.render.figures.layers import layer_lines
from torchhook.render.figures.style import LEGEND, is_number, label, layer_name, new_figure, quiet
from torchhook.render.palette import DIVERGING, LINES, NONFINITE, SEQUENTIAL, UNMEASURED, ZERO

_ROW, _LEAST, _MOST = 16, 320, 900  # pixels: height of a row, least and greatest height of a figure, to fit on paper
_AROUND, _NAME = 170, 12  # pixels: what is above and below all rows, height of a name
_LONGEST = 28  # characters of a name beside an axis
_SIDE = 400  # rows and columns of a matrix; of larger ones every second or third is drawn


_SIMILARITIES = {"cka": "CKA", "cca": "CCA", "svcca": "SVCCA", "pwcca": "PWCCA", "procrustes": "Procrustes similarity"}
_MARKS = {"zero": ("triangle-left", ZERO), "not finite": ("x", NONFINITE)}


def drawn(part: Bars | Matrix) -> Any:
    """The figure of a part.

    >>> drawn(Bars(["conv", "fc"], {"": [0.5, -1.0]}, "change")).data[0].x
    (0.5, -1.0)
    """
    return _matrix(part) if isinstance(part, Matrix) else _bars(part)


def caption(part: Bars | Matrix) -> str:
    """What the figure shows, in words."""
    if isinstance(part, Bars):
        first = " The first layer is at the left." if part.log else ""
        kinds = {_odd(value) for line in part.values.values() for value in line}
        marks = {"zero": " Triangles are zeros.", "not finite": " Crosses are not finite."}
        drawn = "".join(text for kind, text in marks.items() if kind in kinds)
        return f"{_sentence(part.unit)} of {len(part.layers)} layers.{first}{drawn}"
    counts = {"not finite (orange)": int(part.values.isinf().sum()), "missing (grey)": int(part.values.isnan().sum())}
    odd = "".join(f" {count} values are {what}." for what, count in counts.items() if count)
    every = f" One row and column of {_stride(part)} is drawn." if _stride(part) > 1 else ""
    what = " layers" if part.unit in _SIMILARITIES else ""
    return f"{_sentence(part.unit)}, {len(part.rows)} × {len(part.columns)}{what}.{odd}{every}"


def _sentence(unit: str) -> str:
    """A unit as the beginning of a sentence."""
    return _SIMILARITIES.get(unit) or unit[:1].upper() + unit[1:]


def _bars(part: Bars) -> Any:
    if part.log:
        return layer_lines({name: (list(part.layers), list(line)) for name, line in part.values.items()}, part.unit)
    figure, places = new_figure(), list(range(len(part.layers)))
    text = {"customdata": list(map(layer_name, part.layers)), "hovertemplate": "%{customdata}: %{x:.4g}<extra></extra>"}
    for (name, line), colour in zip(part.values.items(), cycle(LINES), strict=False):
        values = [value if is_number(value) else None for value in line]
        figure.add_bar(y=places, x=values, name=label(name), orientation="h", marker_color=colour, **text)
    for meaning, (symbol, colour) in _MARKS.items():
        rows = [row for line in part.values.values() for row, value in enumerate(line) if _odd(value) == meaning]
        if rows:
            marker = {"symbol": symbol, "color": colour, "size": 9}
            figure.add_scatter(y=rows, x=[0.0] * len(rows), mode="markers", marker=marker, name=meaning)
    quiet(figure, height=_height(len(part.layers) * max(1, len(part.values))))
    figure.update_xaxes(title_text=part.unit, showgrid=True)
    figure.update_yaxes(**_names(part.layers, places), autorange="reversed", showgrid=False)
    return figure.update_layout(showlegend=len(figure.data) > 1, legend=LEGEND, bargap=0.25)


def _odd(value: float | None) -> str | None:
    if value is None:
        return None
    return "zero" if value == 0 else None if is_number(value) else "not finite"


def _matrix(part: Matrix) -> Any:
    stride = _stride(part)
    values = part.values[::stride, ::stride].double()
    rows, columns = (list(map(layer_name, names[::stride])) for names in (part.rows, part.columns))
    cells = [[value if math.isfinite(value) else None for value in line] for line in values.tolist()]
    odd = [[None if math.isfinite(value) else int(math.isnan(value)) for value in line] for line in values.tolist()]
    known = [abs(value) for line in cells for value in line if value is not None]
    signed, most = bool((values < 0).any()), max([1.0, *known])
    places = {"x": columns, "y": rows}
    colours = [[0, NONFINITE], [0.5, NONFINITE], [0.5, UNMEASURED], [1, UNMEASURED]]
    figure, unit = new_figure(), label(_SIMILARITIES.get(part.unit, part.unit))
    figure.add_heatmap(**places, z=odd, zmin=0, zmax=1, showscale=False, colorscale=colours, hoverinfo="skip")
    figure.add_heatmap(
        **places,
        z=cells,
        zmin=-most if signed else 0.0,
        zmax=most,
        colorscale=DIVERGING if signed else SEQUENTIAL,
        colorbar={
            "title": {"text": unit, "side": "right"},
            "thickness": 12,
            "outlinewidth": 0,
        },
        hovertemplate="%{y} – %{x}: %{z:.4g}<extra></extra>",
    )
    quiet(figure, height=_height(len(rows)))
    figure.update_xaxes(**_names(part.columns[::stride], columns), type="category", tickangle=-90)
    return figure.update_yaxes(
        **_names(part.rows[::stride], rows), type="category", autorange="reversed", showgrid=False
    )


def _stride(part: Matrix) -> int:
    return max(1, math.ceil(max(len(part.rows), len(part.columns)) / _SIDE))


def _height(rows: int) -> int:
    return min(_MOST, max(_LEAST, _AROUND + _ROW * rows))


def _names(names: Sequence[str], places: Sequence[Any]) -> dict[str, Any]:
    """The names beside an axis, as many as fit."""
    every = math.ceil(len(names) * _NAME / (_MOST - _AROUND)) or 1
    return {
        "tickvals": list(places[::every]),
        "ticktext": [layer_name(name, _LONGEST) for name in names[::every]],
    }
