"""The model in execution order: a layer after the other, in the modules that they are part of."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import layer_link, tick
from torchhook.dashboard.sheets import Book, worst_in
from torchhook.render.words import printable


def page(book: Book) -> Component:
    """As of now."""
    return html.Div(
        [
            tick("graph-tick"),
            dcc.Store(id="graph-shown", data={"run": book.name, "stamp": book.stamp()}),
            html.P(
                "From top to bottom as the layers ran; boxes are the modules that they are part of.", className="quiet"
            ),
            html.Div(_boxes(book), id="graph-boxes", className="chain"),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Colours and numbers follow."""

    @app.callback(
        Output("graph-boxes", "children"),
        Output("graph-shown", "data"),
        Input("graph-tick", "n_intervals"),
        State("graph-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        stamp = book.stamp()
        return (no_update, no_update) if stamp == shown["stamp"] else (_boxes(book), {**shown, "stamp": stamp})


def _boxes(book: Book) -> list[Component]:
    """Layers that follow one another in the same module are in one box."""
    sheet = book.sheet("std", "output")
    spread = dict(zip(sheet.paths, sheet.rows[-1], strict=True)) if sheet.rows else {}
    health = book.health()
    boxes: list[tuple[str, list[Component]]] = []
    for path, kind in book.layers().items():
        above = path.rpartition(".")[0]
        if not boxes or boxes[-1][0] != above:
            boxes.append((above, []))
        worst = worst_in(path, health)
        value = spread.get(path)
        told = "" if value is None else f"std {value:.3g}"
        content = [html.B(printable(kind)), layer_link(book.name, path), html.Span(told, className="quiet")]
        boxes[-1][1].append(html.Li(content, className=f"node {worst or 'healthy'}"))
    return [
        html.Section([html.H3(printable(above) or printable(book.run.model)), html.Ol(nodes)], className="box")
        for above, nodes in boxes
    ]
