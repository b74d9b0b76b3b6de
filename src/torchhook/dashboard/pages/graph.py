"""The model as a graph: a layer after the other as they ran, in the modules that they are part of, and the wires."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.graph_layout import ROW, Wire, picture
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import layer_link, tick
from torchhook.dashboard.sheets import Book, worst_in
from torchhook.render.words import printable

_NAMED = 3  # layers that one is joined to; of others, their number


def page(book: Book) -> Component:
    """As of now."""
    return html.Div(
        [
            tick("graph-tick"),
            dcc.Store(id="graph-shown", data={"run": book.name, "stamp": book.stamp()}),
            html.P(
                "From top to bottom as the layers ran, under the modules that they are part of; the lines show from"
                " where to where values go.",
                className="quiet",
            ),
            html.Div(_list(book), id="graph-list"),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Colours and numbers follow."""

    @app.callback(
        Output("graph-list", "children"),
        Output("graph-shown", "data"),
        Input("graph-tick", "n_intervals"),
        State("graph-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        stamp = book.stamp()
        return (no_update, no_update) if stamp == shown["stamp"] else (_list(book), {**shown, "stamp": stamp})


def _list(book: Book) -> Component:
    """A line for each layer, a heading where the module changes that they are part of, and the wires beside."""
    sheet = book.sheet("std", "output")
    spread = dict(zip(sheet.paths, sheet.rows[-1], strict=True)) if sheet.rows else {}
    health, sources = book.health(), book.sources()
    lines: list[Component] = []
    line_of: dict[str, int] = {}
    inside, before = None, ""
    for path, kind in book.layers().items():
        above = path.rpartition(".")[0]
        if above != inside:
            lines.append(html.Li(html.H3(printable(above) or printable(book.run.model)), className="module"))
            inside = above
        line_of[path] = len(lines)
        value = spread.get(path)
        told = [
            html.B(printable(kind)),
            layer_link(book.name, path),
            html.Span("" if value is None else f"std {value:.3g}", className="quiet"),
            html.Span(_origin(sources.get(path, []), before), className="quiet"),
        ]
        lines.append(html.Li(told, className=f"node {worst_in(path, health) or 'healthy'}"))
        before = path
    wires = [
        Wire(line_of[source], line)
        for path, line in line_of.items()
        for source in sources.get(path, [])
        if source in line_of and source != path
    ]
    drawn, wide = picture(wires, len(lines))
    gutter = html.Img(src=drawn, width=wide, height=len(lines) * ROW, alt="From where to where values go")
    return html.Div([gutter, html.Ol(lines)], className="wired", style={"--row": f"{ROW}px"})


def _origin(sources: list[str], before: str) -> str:
    """Where what a layer is given comes from, if that is not simply the layer before."""
    if not sources or sources == [before]:
        return ""
    named = ", ".join(printable(source) for source in sources[:_NAMED])
    return f"from {named}" + (f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else "")
