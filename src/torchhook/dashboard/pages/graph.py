"""The model page: layers in execution order, grouped by the module that they are in, with their connections."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.graph_layout import ROW, Wire, picture
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import layer_link, tick
from torchhook.dashboard.sheets import Book, worst_in
from torchhook.render.words import printable

_NAMED = 3  # sources of a layer that are named; others are counted


def page(book: Book) -> Component:
    """The page in its current state."""
    return html.Div(
        [
            tick("graph-tick"),
            dcc.Store(id="graph-shown", data={"run": book.name, "stamp": book.stamp()}),
            html.P(
                "Layers in execution order, grouped by module. Lines show which layer's output goes where.",
                className="quiet",
            ),
            html.Div(_list(book), id="graph-list"),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Keep colours and numbers up to date."""

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
    """A line for each layer, a heading for each module that contains them, and the wires beside."""
    sheet = book.sheet("std", "output")
    spread = dict(zip(sheet.paths, sheet.row(-1), strict=True)) if sheet.steps else {}
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
        cells = [
            html.B(printable(kind)),
            layer_link(book.name, path),
            html.Span("" if value is None else f"std {value:.3g}", className="quiet"),
            html.Span(_sources_text(sources.get(path, []), before), className="quiet"),
        ]
        lines.append(html.Li(cells, className=f"node {worst_in(path, health) or 'healthy'}"))
        before = path
    wires = [
        Wire(line_of[source], line)
        for path, line in line_of.items()
        for source in sources.get(path, [])
        if source in line_of and source != path
    ]
    drawn, wide = picture(wires, len(lines))
    gutter = html.Img(src=drawn, width=wide, height=len(lines) * ROW, alt="Connections between layers")
    return html.Div([gutter, html.Ol(lines)], className="wired", style={"--row": f"{ROW}px"})


def _sources_text(sources: list[str], before: str) -> str:
    """The layers that a layer gets its input from, unless that is simply the previous one."""
    if not sources or sources == [before]:
        return ""
    named = ", ".join(printable(source) for source in sources[:_NAMED])
    return f"from {named}" + (f" and {len(sources) - _NAMED} more" if len(sources) > _NAMED else "")
