"""The Dash application: the page for each URL, and the frame around all pages."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote_to_bytes

from dash import ClientsideFunction, Dash, Input, Output, dcc, html, set_props
from dash.development.base_component import Component
from flask import Response, send_file

from torchhook.core.errors import TorchhookError
from torchhook.dashboard.guard import Guard
from torchhook.dashboard.library import Library
from torchhook.dashboard.pages import compare, flow, graph, layer, layers, overview, ranks, results, runs
from torchhook.dashboard.parts import PAGES, address, waiting
from torchhook.dashboard.sheets import Book
from torchhook.render.figures.style import SCRIPT
from torchhook.render.to_html import STYLE
from torchhook.render.words import printable

_PAGES = (compare, flow, graph, layer, layers, overview, ranks, runs)
_INDEX = """<!doctype html>
<html lang="en">
<head>
{%metas%}
<meta name="color-scheme" content="light dark">
<title>{%title%}</title>
<link rel="icon" href="data:,">
<style>STYLE</style>
<link rel="preload" as="script" href="/plotly.js">
<script>let plotlyLoaded; window.Plotly = new Promise((loaded) => { plotlyLoaded = loaded; });</script>
{%css%}
</head>
<body class="dashboard KIND">
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>
"""


def create_app(library: Library, guard: Guard | None = None) -> Dash:
    """The application for a library of runs."""
    kind = "folder" if library.only is None and library.only_result is None else "one"
    app = Dash(
        __name__,
        title="torchhook",
        update_title="",
        serve_locally=True,
        assets_folder=str(Path(__file__).with_name("assets")),
        suppress_callback_exceptions=True,  # most components of callbacks exist on one page only
        index_string=_INDEX.replace("STYLE", STYLE.read_text(encoding="utf-8")).replace("KIND", kind),
        add_log_handler=False,
        on_error=_show_error,
        meta_tags=[{"name": "viewport", "content": "width=device-width, initial-scale=1"}],
    )
    app.layout = _frame
    plain = app.interpolate_index
    app.interpolate_index = lambda **parts: plain(**parts | {"scripts": _without_graph(parts["scripts"])})
    (guard or Guard()).protect(app.server, library)
    app.server.add_url_rule("/plotly.js", view_func=_plotly)  # see assets/dashboard.js
    drawn = ClientsideFunction("torchhook", "tree")
    app.clientside_callback(drawn, Output("tree", "className"), Input("tree-shown", "data"))
    for page in _PAGES:
        page.register(app, library)

    @app.callback(
        Output("page", "children"),
        Output("where", "children"),
        Input("url", "pathname"),
        Input("url", "search"),
        on_error=_not_shown,
    )
    def _(pathname: str | None, search: str | None) -> Any:
        return _routed(library, pathname or "/", parse_qs((search or "").lstrip("?"), errors="surrogateescape"))

    return app


def _without_graph(scripts: str) -> str:
    """The scripts of all pages, with that of the graph in a template, for the one page that needs it to execute."""
    lines = scripts.splitlines()
    late = [line for line in lines if "suites/dash_cytoscape/" in line]
    now = "\n".join(line for line in lines if line not in late)
    return f'{now}<template id="later">{"".join(late)}</template>'


def _plotly() -> Response:
    return send_file(SCRIPT, mimetype="text/javascript", max_age=3600)


def _show_error(error: Exception) -> None:
    """Show the error instead of the page, whose header stays."""
    set_props("page", {"children": _said(error)})


def _not_shown(error: Exception) -> tuple[Component, Component]:
    return _said(error), html.H1("Cannot show this page")


def _said(error: Exception) -> Component:
    """What is said of an error: the run is broken, newer or deleted, or there is a bug."""
    is_ours = isinstance(error, TorchhookError)
    if not is_ours:
        traceback.print_exception(error)
    message = str(error) if is_ours else f"{type(error).__name__}: {error}"
    return html.P(printable(message), role="alert")


def _frame() -> Component:
    return html.Div(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            html.Header([html.P(dcc.Link("torchhook", href="/"), className="quiet"), html.Div(id="where")]),
            waiting(html.Main(id="page"), target_components={"page": "children"}),
        ]
    )


def _routed(library: Library, pathname: str, query: dict[str, list[str]]) -> tuple[Component, Component]:
    """The page at a URL, and its header."""
    parts = [os.fsdecode(unquote_to_bytes(part)) for part in pathname.strip("/").split("/")]
    if parts == [""] and library.only_result is not None:
        parts = ["result", library.only_result]
    if parts == [""]:
        if library.only is None:
            return html.Div([runs.page(library), results.listed(library)]), html.H1("Runs")
        parts = ["run", library.only.name]
    if parts == ["compare"]:
        return compare.page(library, query.get("run", [])), html.H1("Comparison")
    if parts[0] == "result" and len(parts) == 2:
        return results.page(library, parts[1])
    if parts[0] != "run" or len(parts) not in (2, 3):
        return html.P(f"There is no page {printable(pathname)!r}.", role="alert"), html.H1("Not found")
    book, name = library.book(parts[1]), parts[2] if len(parts) == 3 else ""
    header = _header(book.name, "layers" if name == "layer" else name, bool(book.run.rank_steps))
    try:
        return _page_of(book, name, {key: values[0] for key, values in query.items()}), header
    except Exception as error:
        return _said(error), header


def _page_of(book: Book, name: str, first: dict[str, str]) -> Component:
    """A page of a run; `first` are the choices in its URL."""
    if name == "":
        return overview.page(book)
    if name == "layers":
        return layers.page(book, first.get("stat", "std"), first.get("port", "output"))
    if name == "layer":
        return layer.page(book, first.get("path", ""))
    if name == "flow":
        return flow.page(book, int(first["step"]) if first.get("step", "").isdecimal() else None)
    if name == "graph":
        return graph.page(book)
    if name == "ranks":
        return ranks.page(book)
    return html.P(f"There is no page {printable(name)!r}.", role="alert")


def _header(run: str, current: str, has_ranks: bool) -> Component:
    """The name of a run and links to its pages."""
    links = [
        dcc.Link(text, href=address(run, page), className="current" if page == current else "")
        for page, text in PAGES.items()
        if page != "ranks" or has_ranks
    ]
    return html.Div([html.H1(printable(run)), html.Nav(links, **{"aria-label": "Pages of this run"})])
