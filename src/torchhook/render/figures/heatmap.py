"""Layers × steps as colours: one statistic of every layer, or what was found there."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

from torchhook.render.figures.style import LEGEND, LONG, ODD, label, layer_name, new_figure, odd_kind, quiet, usual_gap
from torchhook.render.palette import DIVERGING, GREY, SEQUENTIAL, SEVERITY, UNMEASURED

_SIGNED = ("mean", "min", "max", "skewness")
_CENTRED = (*_SIGNED, "ratio")  # of two runs, where 1 is in the middle
_LINEAR = (*_SIGNED, "zero_fraction", "nonfinite", "nan", "posinf", "neginf", "count")  # others go on a log scale
_ROW, _AROUND = 14, 90  # pixels: height of a row, and of what is above and below all rows
_LONGEST = 28  # characters of a name beside the axis
_BELOW = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "thickness": 12, "outlinewidth": 0}
_SCALE = 40  # pixels: height of a scale of colours below the steps, where it takes no width from a phone
_HEALTHY = "rgba(0,158,115,.25)"

Rows = Sequence[Sequence[float | None]]


class Stretch(NamedTuple):
    """Some steps of a layer, drawn as one bar; `text` is shown when the mouse is on it."""

    path: str
    start: float
    end: float
    text: str
    opacity: float = 1.0
    is_dated: bool = True  # otherwise its start is not known, and it is hatched


def heatmap(field: str, steps: Sequence[int], paths: Sequence[str], rows: Rows, along: str = "step") -> Any:
    """One statistic; None was not measured. Each row of the data is a step, so that a live page can append new ones.

    >>> values, zeros, *_ = heatmap("std", [0, 10], ["conv", "fc"], [[1.0, 0.1], [10.0, 0.0]]).data
    >>> values.z, zeros.name, zeros.y, zeros.base, zeros.x
    (([0.0, -1.0], [1.0, None]), 'zero', ('fc',), (5.0,), (10.0,))
    """
    name = field if field in _LINEAR else f"log₁₀ {field}"
    steps, rows = spaced(steps, rows)
    figure = new_figure().add_heatmap(
        x=list(steps),
        y=[layer_name(path) for path in paths],
        z=heatmap_rows(field, rows),
        transpose=True,
        hoverongaps=False,
        colorscale=DIVERGING if field in _CENTRED else SEQUENTIAL,
        zmid=0 if field in _CENTRED else None,
        colorbar={"title": {"text": name}, **_BELOW},
        hovertemplate=f"%{{y}}<br>{along} %{{x}}<br>{name} %{{z}}<extra></extra>",
    )
    figure.add_traces(_odd_bars(field, steps, paths, rows, along))
    _by_layer(figure, paths, step_range(steps), least=320, most=1400, below=_SCALE).update_xaxes(title_text=along)
    frame = {"showline": True, "mirror": True, "linecolor": GREY}  # the middle of a scale may be the colour of the page
    return figure.update_layout(plot_bgcolor=UNMEASURED).update_xaxes(**frame).update_yaxes(**frame)


def spaced(steps: Sequence[int], rows: Rows) -> tuple[Sequence[int], Rows]:
    """The steps and their rows, with empty ones in long gaps, so that each row is drawn at its own step only.

    >>> spaced([0, 1, 2, 50], [[1.0], [2.0], [3.0], [4.0]])
    ([0, 1, 2, 3, 49, 50], [[1.0], [2.0], [3.0], [None], [None], [4.0]])
    """
    usual = usual_gap(steps)
    found: list[tuple[int, Sequence[float | None]]] = []
    for step, row in zip(steps, rows, strict=True):
        if found and step - found[-1][0] > LONG * usual:
            found += [(between, [None] * len(row)) for between in (found[-1][0] + usual, step - usual)]
        found.append((step, row))
    return [step for step, _ in found], [row for _, row in found]


def heatmap_rows(field: str, rows: Rows) -> list[list[float | None]]:
    """What is drawn of `rows`: the values themselves, or their decimal logarithms; None where there is none."""
    return [[_height(value, field not in _LINEAR) for value in row] for row in rows]


def _odd_bars(field: str, steps: Sequence[int], paths: Sequence[str], rows: Rows, along: str) -> list[dict[str, Any]]:
    """What has no colour on the scale of a heat map, as its further traces; they have names for the legend."""
    found: dict[str, list[Stretch]] = {"zero": [], "not finite": []}
    edges = _edges(steps)
    for path, values in zip(paths, zip(*rows, strict=True), strict=False):
        kinds = [odd_kind(value, field not in _LINEAR) for value in values]
        for kind, some in groupby(range(len(kinds)), key=kinds.__getitem__):
            if kind in found:
                first, last = (numbers := list(some))[0], numbers[-1]
                text = f"{kind} at {along} {steps[first]:,}" + (f" to {steps[last]:,}" if last > first else "")
                found[kind].append(Stretch(path, edges[first], edges[last + 1], text))
    missing = any(value is None for row in rows for value in row)
    unmeasured = {**_bars("not measured", UNMEASURED, ()), "x": [None], "showlegend": missing}  # it is the background
    return [*(_bars(kind, ODD[kind], stretches) for kind, stretches in found.items()), unmeasured]


def health_map(paths: Sequence[str], steps: tuple[int, int], found: Mapping[str, Sequence[Stretch]]) -> Any:
    """What was found at each layer, from which step on, by severity; the rest is in the colour of health.

    >>> figure = health_map(["conv", "fc"], (0, 90), {"error": [Stretch("fc", 40, 90, "TH201")]})
    >>> figure.data[-1].name, figure.data[-1].base, figure.data[-1].x
    ('error', (40,), (50,))
    """
    first, last = steps
    begins: dict[str, float] = dict.fromkeys(paths, last)
    for stretch in chain.from_iterable(found.values()):
        begins[stretch.path] = min(begins[stretch.path], stretch.start)
    healthy = [Stretch(path, first, begin, "nothing found") for path, begin in begins.items()]
    figure = new_figure()
    figure.add_traces([_bars("nothing found", _HEALTHY, healthy)])
    figure.add_traces([_bars(severity, colour, found.get(severity, ())) for severity, colour in SEVERITY.items()])
    most = 460 if any(found.values()) else 220
    return _by_layer(
        figure, paths, steps, least=120, most=most, named={bar.path for bars in found.values() for bar in bars}
    )


def step_range(steps: Sequence[int]) -> list[float]:
    """The ends of an axis on which each step has its width."""
    return [_edges(steps)[0], _edges(steps)[-1]] if steps else [0.0, 1.0]


def _edges(steps: Sequence[int]) -> list[float]:
    """The borders between steps, and those around all."""
    between = [(one + other) / 2 for one, other in pairwise(steps)]
    around = (2 * steps[0] - between[0], 2 * steps[-1] - between[-1]) if between else (steps[0] - 0.5, steps[0] + 0.5)
    return [around[0], *between, around[1]]


def _height(value: float | None, log: bool) -> float | None:
    if value is None or odd_kind(value, log):
        return None
    return float(f"{math.log10(value):.4g}") if log else value


def _bars(name: str, colour: str, stretches: Sequence[Stretch]) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [layer_name(stretch.path) for stretch in stretches],
        "base": [stretch.start for stretch in stretches],
        "x": [stretch.end - stretch.start for stretch in stretches],
        "width": 1,
        "marker": {
            "color": colour,
            "opacity": [stretch.opacity for stretch in stretches],
            "line": {"width": 0},
            "pattern": {"shape": ["" if stretch.is_dated else "/" for stretch in stretches], "fgopacity": 1},
        },
        "hovertext": [label(stretch.text) for stretch in stretches],
        "hovertemplate": "%{y}<br>%{hovertext}<extra></extra>",
        "showlegend": bool(stretches),
    }


def _by_layer(
    figure: Any,
    paths: Sequence[str],
    steps: Sequence[float],
    least: int,
    most: int,
    below: int = 0,
    named: Collection[str] = (),
) -> Any:
    """The axes: layers from top to bottom, with as many names as fit, those of `named` first, and steps."""
    height = min(most, max(least, _AROUND + _ROW * len(paths)))
    quiet(figure, height + below).update_layout(showlegend=True, legend=LEGEND, barmode="overlay")
    figure.update_xaxes(title_text="step", range=list(steps))
    rows = _far_apart([path in named for path in paths], -(-len(paths) * _ROW // (height - _AROUND)) or 1)
    return figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        type="category",
        categoryarray=[layer_name(path) for path in paths],
        tickmode="array",
        tickvals=[layer_name(paths[row]) for row in rows],
        ticktext=[layer_name(paths[row], _LONGEST) for row in rows],
    )


def _far_apart(wanted: Sequence[bool], room: int) -> list[int]:
    """Positions that are at least `room` apart, the wanted ones first.

    >>> _far_apart([False, False, True, False, False, False], 2)
    [0, 2, 4]
    """
    chosen: list[int] = []
    for number in sorted(range(len(wanted)), key=lambda number: not wanted[number]):
        if all(abs(number - other) >= room for other in chosen):
            chosen.append(number)
    return sorted(chosen)
