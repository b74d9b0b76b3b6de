"""A number by layer, in execution order: how gradients flow, what activations look like, how far each step goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchhook.core.findings import Report
from torchhook.render.figures.style import BLUE, GREEN, VERMILLION, is_number, label, plotly, quiet

HEALTHY_UPDATES = (1e-5, 3e-2)
"""How far a healthy step moves a parameter, relative to its size."""

NAMED = 30  # more layers than this have numbers below the axis, and their names under the pointer
LONGEST = 20  # characters of a name below the axis


@dataclass(frozen=True)
class Panel:
    """One number of the layers of a kind, and how it is drawn."""

    title: str
    key: str
    layers: Sequence[Mapping[str, Any]]
    log: bool = True
    band: tuple[float, float] | None = None

    def has_height(self, layer: Mapping[str, Any]) -> bool:
        """Whether the number of a layer has a place on the axis."""
        value = layer[self.key]
        return is_number(value) and (value > 0 or not self.log)


def gradient_flow(report: Report) -> Any:
    """The size of the gradient by layer, on a log scale: where it fades, where it explodes.

    >>> report = Report(layers=({"site": "fc", "kind": "module", "grad_norm": 1e-3},))
    >>> gradient_flow(report).data[0].y, gradient_flow(Report())
    ((0.001,), None)
    """
    return _stacked(
        Panel("Gradient at each output (rms)", "grad_norm", _with(report, "module", "grad_norm")),
        Panel("Gradient of each parameter (norm)", "grad_norm", _with(report, "parameter", "grad_norm")),
    )


def activations(report: Report) -> Any:
    """The spread of each module's output, on a log scale, and the share of zeros in it.

    >>> report = Report(layers=({"site": "relu", "kind": "module", "std": 0.5, "zero_fraction": 0.4},))
    >>> [trace.y for trace in activations(report).data if trace.y]
    [(0.5,), (0.4,)]
    """
    return _stacked(
        Panel("Spread of each output (standard deviation)", "std", _with(report, "module", "std")),
        Panel("Share of zeros", "zero_fraction", _with(report, "module", "zero_fraction"), log=False),
    )


def updates(report: Report) -> Any:
    """How far a step moved each parameter, relative to its size; the healthy band is shaded.

    >>> report = Report(layers=({"site": "fc.weight", "kind": "parameter", "update_ratio": 0.3},))
    >>> updates(report).data[0].marker.color == (VERMILLION,)
    True
    """
    layers = _with(report, "parameter", "update_ratio")
    title = "Each update, relative to its parameter"
    return _stacked(Panel(title, "update_ratio", layers, band=HEALTHY_UPDATES))


def _with(report: Report, kind: str, key: str) -> list[Mapping[str, Any]]:
    return [layer for layer in report.layers if layer["kind"] == kind and layer.get(key) is not None]


def _stacked(*panels: Panel) -> Any:
    """The panels that have something to show, one above the other."""
    filled = [panel for panel in panels if panel.layers]
    if not filled:
        return None
    same = all(_sites(panel) == _sites(filled[0]) for panel in filled)  # then names below the last one are enough
    axes = {"rows": len(filled), "shared_xaxes": same, "vertical_spacing": 0.14 if same else _gap(filled[0])}
    figure = plotly("subplots").make_subplots(**axes, subplot_titles=[panel.title for panel in filled])
    for row, panel in enumerate(filled, start=1):
        _draw(figure, row, panel)
    figure.update_annotations(x=0, xanchor="left", yshift=4, font_size=12)
    return quiet(figure, height=300 * len(filled))


def _sites(panel: Panel) -> list[str]:
    return [layer["site"] for layer in panel.layers]


def _gap(panel: Panel) -> float:
    """The room below a panel, as a share of the figure: names stand on end there."""
    names = _sites(panel) if len(panel.layers) <= NAMED else [""]
    return 0.14 + 0.008 * min(max(map(len, names)), LONGEST)


def _draw(figure: Any, row: int, panel: Panel) -> None:
    where = {"row": row, "col": 1}
    figure.add_trace(_points(panel), **where)
    figure.add_trace(_odd_ones(panel), **where)
    if panel.band is not None:
        figure.add_hrect(*panel.band, fillcolor=GREEN, opacity=0.12, line_width=0, layer="below", **where)
    figure.update_yaxes(**_scale(panel), **where)
    figure.update_xaxes(**_ticks(panel.layers), range=[0.5, len(panel.layers) + 0.5], **where)


def _points(panel: Panel) -> Any:
    """What has a height; with a band, a diamond lies outside of it."""
    low, high = panel.band or (-math.inf, math.inf)
    values = [layer[panel.key] if panel.has_height(layer) else None for layer in panel.layers]
    inside = [value is None or low <= value <= high for value in values]
    return plotly("graph_objects").Scatter(
        x=list(range(1, len(values) + 1)),
        y=values,
        mode="lines+markers" if panel.band is None else "markers",
        line={"color": BLUE, "width": 1},
        marker={"color": [BLUE if fine else VERMILLION for fine in inside], "size": 6 if len(values) <= 100 else 4},
        marker_symbol=["circle" if fine else "diamond" for fine in inside],
        text=[_hover(panel, layer) for layer in panel.layers],
        hovertemplate="%{text}<extra></extra>",
    )


def _odd_ones(panel: Panel) -> Any:
    """What has no height: a zero is a triangle at the bottom of a log scale, what is not finite a cross at the top."""
    odd = [(x, layer) for x, layer in enumerate(panel.layers, start=1) if not panel.has_height(layer)]
    bottom, top = (10**end if panel.log else end for end in _ends(panel))
    zero = [is_number(layer[panel.key]) for _, layer in odd]
    return plotly("graph_objects").Scatter(
        x=[x for x, _ in odd],
        y=[bottom if is_zero else top for is_zero in zero],
        mode="markers",
        cliponaxis=False,
        marker={"color": VERMILLION, "size": 8},
        marker_symbol=["triangle-down" if is_zero else "x" for is_zero in zero],
        text=[_hover(panel, layer) for _, layer in odd],
        hovertemplate="%{text}<extra></extra>",
    )


def _scale(panel: Panel) -> dict[str, Any]:
    """A share goes up in quarters, a log scale in whole powers of ten; the lines at both ends are drawn too."""
    bottom, top = _ends(panel)
    step = math.ceil((top - bottom) / 5) if panel.log else 0.25
    edge = (top - bottom) / 20
    kind = "log" if panel.log else "linear"
    return {"type": kind, "tick0": bottom, "dtick": step, "range": [bottom - edge, top + edge]}


def _ends(panel: Panel) -> tuple[float, float]:
    """The lowest and the highest line across: of a log scale the powers of ten around its values."""
    if not panel.log:
        return 0.0, 1.0
    values = [layer[panel.key] for layer in panel.layers if panel.has_height(layer)]
    powers = [math.log10(value) for value in (*values, *(panel.band or ()))] or [0.0]
    return math.floor(min(powers) - 0.1), math.ceil(max(powers) + 0.1)


def _hover(panel: Panel, layer: Mapping[str, Any]) -> str:
    name = f"<b>{label(layer['site'] or 'the model')}</b>"
    return "<br>".join([name, label(layer.get("module") or layer["kind"]), f"{layer[panel.key]:.3g}"])


def _ticks(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if len(layers) > NAMED:
        return {"nticks": 8}
    names = [_short(layer["site"] or "the model") for layer in layers]
    return {"tickvals": list(range(1, len(layers) + 1)), "ticktext": names, "autotickangles": [0, -90]}


def _short(name: str) -> str:
    """The end of a long name: there its own part is."""
    return label(name if len(name) <= LONGEST else f"…{name[1 - LONGEST :]}")
