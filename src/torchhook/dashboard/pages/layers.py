"""Layers × steps, for any statistic; a click leads to the layer."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from dash import Dash, Input, Output, Patch, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard import drawing
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, choice, graph, layer_link, tick
from torchhook.dashboard.sheets import Book
from torchhook.runs.fields import NAMES

_NUMBERS = ("_norm", "_ratio")  # ports that have one number a step, whose mean it is


def page(book: Book, stat: str = "std", port: str = "output") -> Component:
    """As of now."""
    ports = book.ports()
    port = port if port in ports else next(iter(ports), "output")
    stat = "mean" if port.endswith(_NUMBERS) else stat if stat in NAMES else "std"
    sheet = book.sheet(stat, port)
    shown = {"run": book.name, "stat": stat, "port": port, "edition": sheet.edition, "rows": len(sheet.rows)}
    links = html.Ul([html.Li(layer_link(book.name, path)) for path in book.layers()], className="many")
    return html.Div(
        [
            tick("layers-tick"),
            dcc.Store(id="layers-shown", data=shown),
            html.Div(
                [
                    choice("layers-port", "of", ports or ["output"], port),
                    choice("layers-stat", "statistic", NAMES, stat),
                ],
                className="choices",
            ),
            graph(
                "layers-heat",
                drawing.heat(sheet),
                f"{stat} of every {port}: layers from first to last, by step. Gaps: zero, or not measured.",
            ),
            html.Details([html.Summary("All layers"), links], open=len(links.children) <= 30),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """New steps are put at the end; a click and a choice lead elsewhere."""

    @app.callback(
        Output("layers-heat", "figure"),
        Output("layers-shown", "data"),
        Input("layers-tick", "n_intervals"),
        State("layers-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        sheet = library.book(shown["run"]).sheet(shown["stat"], shown["port"])
        if sheet.edition == shown["edition"] and len(sheet.rows) == shown["rows"]:
            return no_update, no_update
        now = {**shown, "edition": sheet.edition, "rows": len(sheet.rows)}
        if sheet.edition != shown["edition"]:
            return drawing.heat(sheet), now
        figure = Patch()
        figure["data"][0]["x"].extend(sheet.steps[shown["rows"] :])
        figure["data"][0]["z"].extend(drawing.heat_rows(sheet, shown["rows"]))
        return figure, now

    @app.callback(
        Output("url", "search"),
        Input("layers-stat", "value"),
        Input("layers-port", "value"),
        State("layers-shown", "data"),
        prevent_initial_call=True,
    )
    def _(stat: str, port: str, shown: dict[str, Any]) -> Any:
        is_same = (stat, port) == (shown["stat"], shown["port"])
        return no_update if is_same else f"?{urlencode({'stat': stat, 'port': port})}"

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
        path = next((path for path in paths if drawing.named(path) == drawn), None)
        if path is None:
            return no_update
        return address(shown["run"], "layer", path=path if path in book.layers() else path.rpartition(".")[0])
