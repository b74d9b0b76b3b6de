"""The layers page: any statistic as a heat map of layers × steps. A click opens the layer."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, Patch, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, choice, graph, named, ports_named, stats_named, tick, tree
from torchhook.dashboard.sheets import Book, Sheet
from torchhook.render.figures import heatmap, heatmap_rows, layer_name, spaced, step_range
from torchhook.training.runs.fields import NAMES

# Keep the choices in the URL, so that it can be shared, without reloading the page.
_ADDRESS = """
({ stat, port }) => {
  history.replaceState(history.state, "", "?" + new URLSearchParams({ stat, port }));
  return null;
}
"""
_NUMBERS = ("_norm", "_ratio")  # ports with one number per step, whose only statistic is the mean


def page(book: Book, stat: str = "std", port: str = "output") -> Component:
    """The page in its current state."""
    ports = book.ports() or ["output"]
    figure, caption, shown = _drawn(book, stat, port if port in ports else ports[0])
    choices = [
        choice("layers-port", "measured at", ports_named(ports), shown["port"]),
        choice("layers-stat", "statistic", stats_named(NAMES), shown["stat"]),
    ]
    return html.Div(
        [
            tick("layers-tick"),
            dcc.Store(id="layers-shown", data=shown),
            dcc.Store(id="layers-address"),
            html.Div(choices, className="choices"),
            graph("layers-heat", figure, caption),
            html.Details([html.Summary("All layers"), tree(book)], open=True),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Append new steps; follow clicks and choices."""

    @app.callback(
        Output("layers-heat", "figure"),
        Output("layers-shown", "data"),
        Input("layers-tick", "n_intervals"),
        State("layers-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        sheet = book.sheet(shown["stat"], shown["port"])
        if sheet.edition == shown["edition"] and len(sheet.steps) == shown["rows"]:
            return no_update, no_update
        now = {**shown, "edition": sheet.edition, "rows": len(sheet.steps)}
        late = book.rows(sheet, shown["rows"])
        drawn = heatmap_rows(_drawn_as(sheet), late)
        is_whole = not any(None in row for row in drawn) and len(spaced(sheet.steps, sheet.rows)[0]) == len(sheet.steps)
        if sheet.edition != shown["edition"] or not is_whole:  # what is odd, and gaps, are drawn with the rest
            return heatmap(_drawn_as(sheet), sheet.steps, sheet.paths, book.rows(sheet)), now
        figure = Patch()
        figure["data"][0]["x"].extend(sheet.steps[shown["rows"] :])
        figure["data"][0]["z"].extend(drawn)
        figure["layout"]["xaxis"]["range"] = step_range(sheet.steps)
        return figure, now

    @app.callback(
        Output("layers-heat", "figure", allow_duplicate=True),
        Output("layers-heat-caption", "children"),
        Output("layers-shown", "data", allow_duplicate=True),
        Input("layers-stat", "value"),
        Input("layers-port", "value"),
        State("layers-shown", "data"),
        prevent_initial_call=True,
    )
    def _(stat: str, port: str, shown: dict[str, Any]) -> Any:
        return _drawn(library.book(shown["run"]), stat, port)

    app.clientside_callback(_ADDRESS, Output("layers-address", "data"), Input("layers-shown", "data"))

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("layers-heat", "clickData"),
        State("layers-shown", "data"),
        prevent_initial_call=True,
    )
    def _(click: dict[str, Any] | None, shown: dict[str, Any]) -> Any:
        if not click:
            return no_update
        book = library.book(shown["run"])
        drawn = click["points"][0].get("y")
        paths = book.sheet(shown["stat"], shown["port"]).paths
        path = next((path for path in paths if layer_name(path) == drawn), None)
        if path is None:
            return no_update
        return address(shown["run"], "layer", path=path if path in book.layers() else path.rpartition(".")[0])


def _drawn(book: Book, stat: str, port: str) -> tuple[Any, str, dict[str, Any]]:
    """The figure, its caption, and what the page remembers about it."""
    stat = "mean" if port.endswith(_NUMBERS) else stat if stat in NAMES else "std"
    sheet = book.sheet(stat, port)
    caption = f"{named(stat, port)}: layers in execution order, by step. Click one to open it."
    shown = {"run": book.name, "stat": stat, "port": port, "edition": sheet.edition, "rows": len(sheet.steps)}
    return heatmap(_drawn_as(sheet), sheet.steps, sheet.paths, book.rows(sheet)), caption, shown


def _drawn_as(sheet: Sheet) -> str:
    """What decides the scale: of a port with one number per step, the port, since its mean is a size."""
    return sheet.port if sheet.port.endswith(_NUMBERS) else sheet.field
