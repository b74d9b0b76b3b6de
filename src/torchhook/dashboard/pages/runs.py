"""The page of all runs in a folder: a table to sort, filter and search, whose runs can be opened or compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dash import ClientsideFunction, Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from dash_ag_grid import AgGrid

from torchhook.dashboard.catalog import Catalog, Line
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, state_of, tick
from torchhook.render.words import printable
from torchhook.training.runs.schema import FILE

_SOON, _LATER = 500, 3000  # milliseconds between two looks: while runs are still being read, and after that
_AT_ONCE, _EACH = 0.04, 0.3  # seconds for which runs are read: before the page is sent, and at each look after that
_FIRST = 50  # runs that are sent with the page, more than a screen shows; the others follow, so that it paints sooner
_CURVE = 24  # height of a curve of the loss


def page(library: Library) -> Component:
    """The page with what is known of the runs by now; the rest comes later."""
    catalog = library.catalog
    catalog.refresh(_AT_ONCE)
    lines = catalog.lines()
    first = lines[:_FIRST]
    shown = _shown(catalog, lines) if first == lines else {"edition": -1, "version": 0}
    return html.Div(
        [
            tick("runs-tick", _SOON),
            dcc.Store(id="runs-shown", data=shown),
            html.P(printable(str(library.root)), className="quiet"),
            html.Div(
                [
                    html.Label(["Search", dcc.Input(id="runs-search", type="search")]),
                    dcc.Link("Select runs to compare", id="runs-compare", href="/compare", className="button"),
                ],
                className="bar",
            ),
            AgGrid(
                id="runs-grid",
                columnDefs=_COLUMNS,
                defaultColDef={"filter": "agTextColumnFilter", "minWidth": 90},
                rowData=[_row(line) for line in first],
                getRowId="params.data.name",
                dashGridOptions=_OPTIONS,
                style={"height": _height(lines)},
            ),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Fill in what is read later, add new runs; search, and gather the runs to compare."""
    catalog = library.catalog

    @app.callback(
        Output("runs-grid", "rowData"),
        Output("runs-grid", "rowTransaction"),
        Output("runs-grid", "style"),
        Output("runs-shown", "data"),
        Output("runs-tick", "interval"),
        Input("runs-tick", "n_intervals"),
        State("runs-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, int]) -> Any:
        catalog.refresh(_EACH)
        is_same = shown["edition"] == catalog.edition
        lines = catalog.lines(shown["version"] if is_same else 0)
        after = _LATER if catalog.is_complete else _SOON
        if is_same and not lines:
            return no_update, no_update, no_update, no_update, after
        rows, now = [_row(line) for line in lines], _shown(catalog, lines)
        if is_same:  # the other rows stay as they are
            return no_update, {"update": rows}, no_update, now, after
        return rows, no_update, {"height": _height(lines)}, now, after

    app.clientside_callback(
        ClientsideFunction("runs", "search"), Input("runs-search", "value"), prevent_initial_call=True
    )
    app.clientside_callback(
        ClientsideFunction("runs", "compare"),
        Output("runs-compare", "href"),
        Output("runs-compare", "children"),
        Input("runs-grid", "selectedRows"),
    )


def _shown(catalog: Catalog, lines: list[Line]) -> dict[str, int]:
    """What the page remembers, so that it gets only what has changed since."""
    return {"edition": catalog.edition, "version": max((line.version for line in lines), default=0)}


def _row(line: Line) -> dict[str, Any]:
    """A run as the table gets it; numbers become text in the browser, so that they can be sorted."""
    row = {"name": line.name, "shown": printable(line.name), "href": address(line.name), "started": line.written}
    known = line.summary
    if known is None:
        return {**row, "state": "…"}
    loss = known.last_loss
    found = known.finding
    why = known.error.partition(f"{FILE}' ")[2] or known.error  # without the path, which would fill the cell
    why = why.replace("is not a run, or is corrupt", "Not a run, or corrupt")
    look, state = state_of(known.state, known.errors)
    return {
        **row,
        "started": known.started,
        "state": printable(state),
        "look": look,
        "model": printable(known.model),
        "duration": known.duration,
        "step": known.last_step,
        "loss": _number(loss),
        "losses": curve(known.losses),
        "is_broken": loss is not None and not math.isfinite(loss),
        "finding": printable(f"{found.code} {found.place}: {found.message}" if found else why),
        "severity": str(found.severity) if found else "error" if known.error else "",
    }


def curve(losses: Mapping[int, float]) -> list[int | None]:
    """Losses as heights of a small curve, which is logarithmic if they span more than two powers of ten.

    >>> curve({0: 2.0, 1: 1.0, 2: math.nan, 3: 1.5})
    [24, 0, None, 12]
    """
    top = math.inf
    known = [loss for loss in losses.values() if -top < loss < top]  # which NaN is not
    low, high = min(known, default=0.0), max(known, default=0.0)
    if low > 0 and high > 100 * low:
        losses = {step: math.log(loss) if -top < loss < top else loss for step, loss in losses.items()}
        low, high = math.log(low), math.log(high)
    scale = _CURVE / (high - low or 1.0)
    return [int(scale * (loss - low) + 0.5) if -top < loss < top else None for loss in losses.values()]


def _number(value: float | None) -> float | None:
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None


def _height(lines: list[Line]) -> str:
    return f"min(75vh, {100 + 40 * max(3, len(lines))}px)"


def _column(field: str, title: str, width: int, **more: Any) -> dict[str, Any]:
    return {"field": field, "headerName": title, "width": width, **more}


def _figures(field: str, title: str, width: int) -> dict[str, Any]:
    """A column of numbers."""
    shown = {"function": f"runs.{field}(params)"}
    return _column(field, title, width, type="rightAligned", filter="agNumberColumnFilter", valueFormatter=shown)


_COLUMNS = [
    _column("name", "run", 165, cellRenderer="RunLink", tooltipField="shown"),
    _column("finding", "first finding", 240, cellRenderer="RunFinding", tooltipField="finding", flex=1, minWidth=160),
    _column("losses", "loss curve", 115, cellRenderer="RunCurve", cellDataType=False, sortable=False, filter=False),
    {**_figures("loss", "last loss", 100), "comparator": {"function": "runs.order"}},
    _column("state", "state", 135, cellRenderer="RunState"),
    _figures("duration", "duration", 105),
    _column("model", "model", 110, tooltipField="model"),
    _figures("step", "last step", 100),
    {**_figures("started", "started", 150), "sort": "desc", "filter": False},
]
THEME = """themeQuartz.withParams({
    backgroundColor: "var(--card)", foregroundColor: "var(--ink)", headerTextColor: "var(--quiet)",
    borderColor: "var(--line)", accentColor: "var(--link)", browserColorScheme: "inherit", fontFamily: "inherit",
    cellHorizontalPadding: "10px"
})"""
_OPTIONS = {
    "theme": {"function": THEME},
    "rowSelection": {"mode": "multiRow", "enableClickSelection": False, "headerCheckbox": False},
    "rowHeight": 40,
    "rowBuffer": 4,  # rows beyond the visible ones: each more makes the first paint later
    "tooltipShowDelay": 300,
    "animateRows": False,
    "localeText": {"noRowsToShow": "No runs yet. The first one will appear here by itself."},
}
