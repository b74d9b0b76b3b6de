"""The figures of the dashboard: pure functions from lists of numbers, in the style of all figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchhook.core.findings import Finding
from torchhook.dashboard.sheets import Sheet, logs
from torchhook.render.figures.layers import HEALTHY_UPDATES
from torchhook.render.figures.style import BLUE, GREEN, GREY, ORANGE, VERMILLION, label, plotly, quiet

COLOURS = (BLUE, ORANGE, GREEN, VERMILLION, "#cc79a7", "#56b4e9", GREY)
_SIGNED = ("mean", "min", "max", "skewness")  # are drawn as they are, others by their logarithms
_SHARES = ("zero_fraction", "nonfinite", "nan", "posinf", "neginf", "count")
_ROW, _LEAST, _MOST = 14, 320, 1400  # pixels
_LEGEND = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}  # above
_LONGEST = 28  # characters of a name beside an axis

Line = Sequence[float | None]


def is_log(field: str) -> bool:
    """Whether a field spans many orders of magnitude."""
    return field not in (*_SIGNED, *_SHARES)


def heat(sheet: Sheet) -> Any:
    """Layers × steps. Rows of the data are steps, so that a new one is simply put at the end."""
    scale = "log₁₀ " if is_log(sheet.field) else ""
    figure = plotly("graph_objects").Figure()
    figure.add_heatmap(
        x=list(sheet.steps),
        y=list(map(named, sheet.paths)),
        z=heat_rows(sheet, 0),
        transpose=True,
        colorscale="RdBu" if sheet.field in _SIGNED else "Cividis",
        zmid=0 if sheet.field in _SIGNED else None,
        colorbar={"title": {"text": f"{scale}{sheet.field}", "side": "right"}, "thickness": 12, "outlinewidth": 0},
        hovertemplate=f"%{{y}}<br>step %{{x}}<br>{scale}{sheet.field} %{{z}}<extra></extra>",
    )
    figure.update_xaxes(title_text="step")
    quiet(figure, height=min(_MOST, max(_LEAST, 90 + _ROW * len(sheet.paths))))
    figure.update_yaxes(autorange="reversed", showgrid=False, **_names(sheet.paths, most=(_MOST - 90) // _ROW))
    return figure.update_layout(uirevision="heat")


def heat_rows(sheet: Sheet, first: int) -> list[list[float | None]]:
    """What is drawn of the rows from the `first` on."""
    rows = sheet.rows[first:]
    return logs(rows) if rows and is_log(sheet.field) else [list(row) for row in rows]


def lines(by_name: Mapping[str, tuple[Sequence[int], Line]], title: str, log: bool = True) -> Any:
    """Numbers by step, a line each."""
    figure = plotly("graph_objects").Figure()
    log = log and any(value and value > 0 for _, values in by_name.values() for value in values)
    for number, (name, (steps, values)) in enumerate(by_name.items()):
        figure.add_scatter(
            x=list(steps),
            y=_positive(values) if log else list(values),
            name=label(name),
            mode="lines+markers" if len(steps) < 3 else "lines",
            connectgaps=True,
            line={"color": COLOURS[number % len(COLOURS)], "width": 1.5},
            hovertemplate="step %{x}: %{y:.4g}",
        )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text=title, type="log" if log else "linear")
    _tell_empty(quiet(figure, height=300))
    return figure.update_layout(showlegend=len(by_name) > 1, legend=_LEGEND, uirevision="lines")


def updates(by_name: Mapping[str, tuple[Sequence[int], Line]]) -> Any:
    """How far steps move parameters, with the healthy band."""
    figure = lines(by_name, "relative update")
    low, high = HEALTHY_UPDATES
    figure.add_hrect(y0=low, y1=high, fillcolor=GREEN, opacity=0.1, line_width=0)
    return figure


def losses(by_name: Mapping[str, tuple[Sequence[int], Line]]) -> Any:
    """The losses of some runs, on a log scale if they span much."""
    known = [value for _, values in by_name.values() for value in values if value is not None]
    return lines(by_name, "loss", log=bool(known) and min(known) > 0 and max(known) > 20 * min(known))


def loss(steps: Sequence[int], values: Line, findings: Sequence[Finding]) -> Any:
    """The loss; where something was found there is a line."""
    figure = losses({"loss": (steps, values)})
    for found in findings[:12]:
        if found.step is not None:
            figure.add_vline(
                x=found.step, line={"color": VERMILLION if found.severity == "error" else ORANGE, "dash": "dot"}
            )
    return figure


def bands(steps: Sequence[int], quantiles: Sequence[Sequence[float]]) -> Any:
    """How values are distributed, over the steps: the median, and bands around it of 50, 90 and 98 %."""
    figure = plotly("graph_objects").Figure()
    columns = list(zip(*quantiles, strict=True))
    for low, high, name in ((0, 6, "98 %"), (1, 5, "90 %"), (2, 4, "50 %")):
        shared = {"x": list(steps), "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
        figure.add_scatter(y=list(columns[low]), showlegend=False, **shared)
        figure.add_scatter(y=list(columns[high]), name=name, fill="tonexty", fillcolor="rgba(0,114,178,.22)", **shared)
    figure.add_scatter(
        x=list(steps),
        y=list(columns[3]),
        name="median",
        mode="lines+markers",
        line={"color": BLUE, "width": 1.5},
        hovertemplate="step %{x}: median %{y:.4g}<extra></extra>",
    )
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="value")
    return quiet(figure, height=300).update_layout(showlegend=True, legend=_LEGEND)


def flow(lines_of: Mapping[str, tuple[Sequence[str], Line]], title: str = "gradient norm") -> Any:
    """A number by layer, in execution order; a cross at the bottom is a zero."""
    figure = plotly("graph_objects").Figure()
    bottom = min((value for _, values in lines_of.values() for value in values if value), default=1.0) / 3
    for number, (name, (paths, values)) in enumerate(lines_of.items()):
        colour, places = COLOURS[number % len(COLOURS)], list(map(named, paths))
        figure.add_scatter(
            x=places,
            y=_positive(values),
            name=label(name),
            mode="lines+markers",
            line={"color": colour, "width": 1},
            hovertemplate="%{x}<br>%{y:.4g}",
        )
        zeros = [place for place, value in zip(places, values, strict=True) if value == 0]
        marker = {"symbol": "x", "size": 9, "color": colour}
        figure.add_scatter(
            x=zeros,
            y=[bottom] * len(zeros),
            mode="markers",
            marker=marker,
            showlegend=False,
            hovertemplate="%{x}<br>0<extra></extra>",
        )
    figure.update_yaxes(type="log", title_text=title)
    paths = list(dict.fromkeys(path for paths, _ in lines_of.values() for path in paths))
    figure.update_xaxes(**_names(paths, most=40))
    return _tell_empty(quiet(figure, height=420)).update_layout(
        showlegend=len(lines_of) > 1, legend=_LEGEND, uirevision="flow"
    )


def _tell_empty(figure: Any) -> Any:
    """Axes without anything on them would look like a fault."""
    if not any(trace.y for trace in figure.data):
        figure.update_xaxes(visible=False).update_yaxes(visible=False)
        figure.add_annotation(text="not measured", showarrow=False, x=0.5, y=0.5, xref="paper", yref="paper")
    return figure


def named(path: str) -> str:
    """A layer as it is called in a figure."""
    return label(path) or "the model"


def _names(paths: Sequence[str], most: int) -> dict[str, Any]:
    """An axis of layers, some of which are named, by the end of a long name."""
    shown = paths[:: -(-len(paths) // most) or 1]
    short = [path if len(path) <= _LONGEST else f"…{path[-_LONGEST:]}" for path in shown]
    return {
        "type": "category",
        "tickmode": "array",
        "tickvals": list(map(named, shown)),
        "ticktext": list(map(named, short)),
    }


def _positive(values: Line) -> list[float | None]:
    """What has a place on a log scale."""
    return [value if value is not None and value > 0 else None for value in values]
