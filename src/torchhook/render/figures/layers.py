"""Numbers by layer, in execution order: gradients, activations, and the sizes of updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, cycle
from typing import Any, NamedTuple

from torchhook.core.findings import Report
from torchhook.core.parts import ROUNDING
from torchhook.render.figures.style import LEGEND, is_number, label, layer_name, new_figure, not_measured, quiet
from torchhook.render.palette import GREEN, GREY, LINES, NONFINITE, VERMILLION, ZERO

HEALTHY_UPDATES = (1e-5, 3e-2)
"""The size of a healthy update, relative to its parameter."""

_SLIDER = 90  # pixels: height of a slider over steps
_AROUND = 40  # pixels: what is above and below all panels and names
NAMED = 22  # names below the axis, as many as fit on a phone; of more layers, some are named, all in the hover text


class LayerValue(NamedTuple):
    """The number of one layer; `kind` is its class, for the hover text."""

    site: str
    value: float | None
    kind: str = ""


@dataclass(frozen=True)
class Panel:
    """One plot by layer: a line per name, and how they are drawn."""

    title: str
    lines: Mapping[str, Sequence[LayerValue]]
    log: bool = True
    band: tuple[float, float] | None = None
    height: int = 300  # pixels
    at: Mapping[int, Sequence[LayerValue]] = field(default_factory=dict)
    """The first line at other steps, which a slider shows."""

    @property
    def longest(self) -> int:
        """The number of characters of a name below the axis, which is vertical."""
        return self.height // 15

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each layer is along the axis, counted from 1."""
        sites = dict.fromkeys(layer.site for line in self.lines.values() for layer in line)
        return {site: number for number, site in enumerate(sites, start=1)}

    def fits(self, value: float | None) -> bool:
        """Whether a number has a place on the axis."""
        return value is not None and is_number(value) and (value > 0 or not self.log)

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest grid line: 0 and 1, or the exponents of the powers of ten around all values."""
        if not self.log:
            return 0.0, 1.0
        every = chain(*self.lines.values(), *self.at.values())
        values = [layer.value for layer in every if self.fits(layer.value)]
        powers = [math.log10(value) for value in (*values, *(self.band or ())) if value] or [0.0]
        return math.floor(min(powers) - 0.1), math.ceil(max(powers) + 0.1)


def gradient_flow(report: Report) -> Any:
    """The size of the gradient by layer, on a log scale: where it vanishes, where it explodes.

    If the report has the gradients of several steps, a slider chooses one.

    >>> report = Report(layers=({"site": "fc", "kind": "module", "grad_norm": 1e-3},))
    >>> gradient_flow(report).data[0].y, gradient_flow(Report())
    ((0.001,), None)
    """
    panels = [
        _with_gradients(_panel(report, title, kind, "grad_norm"), report)
        for title, kind in (("Output gradient (RMS)", "module"), ("Parameter gradient (norm)", "parameter"))
    ]
    figure = _stacked(*panels)
    return figure and _with_slider(figure, [panel for panel in panels if panel.places], report)


def activations(report: Report) -> Any:
    """The standard deviation of each module's output, on a log scale, and the share of zeros in it.

    >>> report = Report(layers=({"site": "relu", "kind": "module", "std": 0.5, "zero_fraction": 0.4},))
    >>> [trace.y for trace in activations(report).data if trace.y]
    [(0.5,), (0.4,)]
    """
    return _stacked(
        _panel(report, "Output (standard deviation)", "module", "std"),
        _panel(report, "Output (share of zeros)", "module", "zero_fraction", log=False),
    )


def updates(report: Report) -> Any:
    """The size of the last update of each parameter, relative to the parameter; the healthy band is shaded.

    >>> report = Report(layers=({"site": "fc.weight", "kind": "parameter", "update_ratio": 0.3},))
    >>> updates(report).data[0].marker.color == (VERMILLION,)
    True
    """
    title = "Parameter update (relative to the parameter)"
    return _stacked(_panel(report, title, "parameter", "update_ratio", band=HEALTHY_UPDATES))


def layer_lines(by_name: Mapping[str, tuple[Sequence[str], Sequence[float | None]]], title: str) -> Any:
    """Layers and their values, on a log scale, with one line per name.

    >>> layer_lines({"net-1": (["conv", "fc"], [0.1, 0.0])}, "gradient norm").data[1].marker.symbol
    ('triangle-down',)
    """
    lines = {name: list(map(LayerValue, *columns)) for name, columns in by_name.items() if columns[1]}
    figure = _stacked(Panel("", lines, height=420))
    if figure is None:
        return not_measured()
    figure.update_yaxes(title_text=title)
    return figure.update_layout(showlegend=len(by_name) > 1, legend=LEGEND)


def _panel(report: Report, title: str, kind: str, key: str, **options: Any) -> Panel:
    known = [layer for layer in report.layers if layer["kind"] == kind and layer.get(key) is not None]
    line = [LayerValue(layer["site"], layer[key], layer.get("module") or kind) for layer in known]
    return Panel(title, {"": line} if line else {}, **options)


def _with_gradients(panel: Panel, report: Report) -> Panel:
    """The panel with its line at the other steps of a report."""
    sites = [layer["site"] for layer in report.layers]
    line = next(iter(panel.lines.values()), ())
    steps = {step: dict(zip(sites, sizes, strict=False)) for step, sizes in report.gradients.items()}
    return replace(
        panel, at={step: [one._replace(value=by.get(one.site)) for one in line] for step, by in steps.items()}
    )


def _with_slider(figure: Any, panels: Sequence[Panel], report: Report) -> Any:
    """The figure with a slider over the steps of its panels; each panel has two traces."""
    steps = list(panels[0].at)
    if not steps or report.span is None:
        return figure
    figure.frames = [
        {
            "name": str(step),
            "traces": list(range(2 * len(panels))),
            "data": [
                change
                for panel in panels
                for change in (
                    {"y": _heights(panel, panel.at[step]), "text": list(map(_hover_text, panel.at[step]))},
                    _odd_ones(panel, panel.at[step], LINES[0]),
                )
            ],
        }
        for step in steps
    ]
    now = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    choices = [{"label": f"{step:,}", "method": "animate", "args": [[str(step)], now]} for step in steps]
    slider = {
        "steps": choices,
        "active": steps.index(report.span[1]) if report.span[1] in steps else 0,
        "currentvalue": {"prefix": "step ", "xanchor": "left", "font": {"color": GREY, "size": 12}},
        "ticklen": 0,
        "font": {"color": "rgba(0,0,0,0)"},  # labels below the ticks would overlap
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 24},
    }
    return figure.update_layout(sliders=[slider], height=figure.layout.height + _SLIDER)


def _stacked(*panels: Panel) -> Any:
    """The panels that have something to show, one above the other; None if there are none."""
    filled = [panel for panel in panels if panel.places]
    if not filled:
        return None
    same = all(panel.places == filled[0].places for panel in filled)  # then names below the last one are enough
    between = 0 if same else _room_below(filled[0])
    height = sum(panel.height for panel in filled) + between
    area = height - _AROUND - _room_below(filled[-1])
    axes = {"shared_xaxes": same, "vertical_spacing": between / area or 0.14}
    figure = new_figure(len(filled), **axes, subplot_titles=[panel.title for panel in filled])
    for row, panel in enumerate(filled, start=1):
        _draw(figure, row, panel)
    figure.update_annotations(x=0, xanchor="left", yshift=4, font_size=12)
    return quiet(figure, height)


def _room_below(panel: Panel) -> int:
    """The room that the vertical names below a panel, and the title of the next one, need, in pixels."""
    return 30 + 7 * min(max(map(len, panel.places)), panel.longest)


def _draw(figure: Any, row: int, panel: Panel) -> None:
    where = {"row": row, "col": 1}
    for (name, line), colour in zip(panel.lines.items(), cycle(LINES), strict=False):
        points = _points(panel, line, GREY if name == ROUNDING else colour)
        figure.add_scatter(**points, name=label(name), **where)
        figure.add_scatter(**_odd_ones(panel, line, colour), showlegend=False, **where)
    if panel.band is not None:
        figure.add_hrect(*panel.band, fillcolor=GREEN, opacity=0.12, line_width=0, layer="below", **where)
    figure.update_yaxes(**_scale(panel), **where)
    figure.update_xaxes(**_ticks(panel), range=[0.5, len(panel.places) + 0.5], **where)


def _points(panel: Panel, line: Sequence[LayerValue], colour: str) -> dict[str, Any]:
    """The values that have a place on the axis; those outside the band are diamonds."""
    low, high = panel.band or (-math.inf, math.inf)
    values = _heights(panel, line)
    inside = [value is None or low <= value <= high for value in values]
    return {
        "x": [panel.places[layer.site] for layer in line],
        "y": values,
        "mode": "lines+markers" if panel.band is None else "markers",
        "line": {"color": colour, "width": 1},
        "marker": {"color": [colour if fine else VERMILLION for fine in inside], "size": 6 if len(line) <= 100 else 4},
        "marker_symbol": ["circle" if fine else "diamond" for fine in inside],
        "text": list(map(_hover_text, line)),
        "hovertemplate": "%{text}<extra></extra>",
    }


def _heights(panel: Panel, line: Sequence[LayerValue]) -> list[float | None]:
    return [layer.value if panel.fits(layer.value) else None for layer in line]


def _odd_ones(panel: Panel, line: Sequence[LayerValue], colour: str) -> dict[str, Any]:
    """The other values: zeros are triangles at the bottom of a log scale, NaN and infinity are crosses at the top.

    Where there are several lines, they have the line's colour around their own.
    """
    odd = [layer for layer in line if layer.value is not None and not panel.fits(layer.value)]
    bottom, top = (10**end if panel.log else end for end in panel.ends)
    zero = [is_number(layer.value) for layer in odd]
    alone = len(panel.lines) == 1
    return {
        "x": [panel.places[layer.site] for layer in odd],
        "y": [bottom if is_zero else top for is_zero in zero],
        "mode": "markers",
        "cliponaxis": False,
        "marker": {"color": [ZERO if is_zero else NONFINITE for is_zero in zero], "size": 8 if alone else 10},
        "marker_line": {"color": colour, "width": 0 if alone else 2},
        "marker_symbol": ["triangle-down" if is_zero else "x" for is_zero in zero],
        "text": list(map(_hover_text, odd)),
        "hovertemplate": "%{text}<extra></extra>",
    }


def _scale(panel: Panel) -> dict[str, Any]:
    """Ticks at quarters, or at powers of ten on a log scale, with grid lines at both ends."""
    bottom, top = panel.ends
    step = math.ceil((top - bottom) / 5) if panel.log else 0.25
    edge = (top - bottom) / 20
    kind = "log" if panel.log else "linear"
    return {"type": kind, "tick0": bottom, "dtick": step, "range": [bottom - edge, top + edge]}


def _ticks(panel: Panel) -> dict[str, Any]:
    named = list(panel.places)[:: math.ceil(len(panel.places) / NAMED)]
    names = [layer_name(site, panel.longest) for site in named]
    return {"tickvals": [panel.places[site] for site in named], "ticktext": names, "autotickangles": [0, -90]}


def _hover_text(layer: LayerValue) -> str:
    value = "" if layer.value is None else f"{layer.value:.3g}"
    return "<br>".join(filter(None, [f"<b>{layer_name(layer.site)}</b>", label(layer.kind), value]))
