"""The page of all runs in a folder, newest first, to open or to compare."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from dash import ALL, Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.core.errors import RunError
from torchhook.core.text import in_units
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, pill, state_of, tick
from torchhook.render.words import printable

_UNREADABLE = ("error", "unreadable")


def page(library: Library) -> Component:
    """The page in its current state."""
    return html.Div(
        [
            tick("runs-tick", 3000),
            html.P(printable(str(library.root)), className="quiet"),
            html.Div(_table(library), id="runs-list"),
            html.Button("Compare selected runs", id="runs-compare", n_clicks=0),
            dcc.Store(id="runs-shown", data=_stamp(library)),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Add new runs as they appear; open the comparison."""

    @app.callback(
        Output("runs-list", "children"),
        Output("runs-shown", "data"),
        Input("runs-tick", "n_intervals"),
        State("runs-shown", "data"),
        State({"kind": "chosen", "run": ALL}, "value"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: Any, values: list[list[str]]) -> Any:
        stamp = _stamp(library)
        return (no_update, no_update) if stamp == shown else (_table(library, _names(values)), stamp)

    @app.callback(
        Output("url", "href"),
        Input("runs-compare", "n_clicks"),
        State({"kind": "chosen", "run": ALL}, "value"),
        prevent_initial_call=True,
    )
    def _(_: int, values: list[list[str]]) -> Any:
        names = _names(values)
        return f"/compare?{urlencode({'run': names}, doseq=True)}" if names else no_update


def _names(values: list[list[str]]) -> list[str]:
    """The selected runs."""
    return [name for value in values for name in value or ()]


def _stamp(library: Library) -> list[Any]:
    return [[name, *_facts(library, name)[:2]] for name in library.names()]


def _facts(library: Library, name: str) -> tuple[str, ...]:
    try:
        run = library.book(name).run
        steps = run.steps
        started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
        last, found = f"{steps[-1] if steps else 0:,}", str(len(run.findings))
        return *state_of(run), run.model, started, last, found, in_units(run.size)
    except RunError as error:
        return *_UNREADABLE, str(error)


def _table(library: Library, chosen: Sequence[str] = ()) -> Component:
    names = library.names()
    if not names:
        return html.P("No runs yet. The first one will appear here by itself.")
    titles = ("", "run", "state", "model", "started", "last measured step", "findings", "size")
    head = html.Thead(html.Tr([html.Th(title, scope="col") for title in titles]))
    return html.Div(
        html.Table([head, html.Tbody([_row(library, name, name in chosen) for name in names])]), className="wide"
    )


def _row(library: Library, name: str, is_chosen: bool) -> Component:
    kind, state, *facts = _facts(library, name)
    if (kind, state) == _UNREADABLE:
        why = html.Td(printable(facts[0]), colSpan=5, className="why")
        return html.Tr([html.Td(), html.Td(printable(name)), html.Td(pill(kind, state)), why])
    text = html.Span(f"compare {printable(name)}", className="hidden")
    options, value = [{"label": text, "value": name}], [name] if is_chosen else []
    box = dcc.Checklist(options, value, id={"kind": "chosen", "run": name})
    cells = [box, dcc.Link(printable(name), href=address(name)), pill(kind, state), *map(printable, facts)]
    return html.Tr([html.Td(cell) for cell in cells])
