"""The comparison page: losses, gradients, activations and findings of several runs."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, card, graph, section, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import layer_lines, loss_curves
from torchhook.render.words import printable


def page(library: Library, names: list[str]) -> Component:
    """The page in its current state."""
    books = [library.book(name) for name in names]
    if not books:
        return html.P(["Choose the runs to compare in the ", dcc.Link("list of runs", href="/"), "."])
    losses, gradients, spreads = _figures(books)
    return html.Div(
        [
            tick("compare-tick"),
            dcc.Store(id="compare-shown", data={"runs": names, "stamp": [book.stamp() for book in books]}),
            section("Loss", graph("compare-loss", losses, "Loss of each run by step.")),
            section(
                "Gradients",
                graph(
                    "compare-gradients",
                    gradients,
                    "Norm of the output gradient of each layer, at the last step of each run. A triangle marks a zero.",
                ),
            ),
            section(
                "Activations",
                graph(
                    "compare-spreads",
                    spreads,
                    "Standard deviation of each layer's output, at the last step of each run. A triangle marks a zero.",
                ),
            ),
            section("Findings", html.Div(_findings(books), id="compare-findings", className="columns")),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Redraw everything when there is something new."""

    @app.callback(
        Output("compare-loss", "figure"),
        Output("compare-gradients", "figure"),
        Output("compare-spreads", "figure"),
        Output("compare-findings", "children"),
        Output("compare-shown", "data"),
        Input("compare-tick", "n_intervals"),
        State("compare-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        books = [library.book(name) for name in shown["runs"]]
        stamp = [book.stamp() for book in books]
        if stamp == shown["stamp"]:
            return (no_update,) * 5
        return *_figures(books), _findings(books), {**shown, "stamp": stamp}


def _figures(books: list[Book]) -> tuple[Any, Any, Any]:
    curves = {book.name: book.curve() for book in books}
    losses = loss_curves({name: (curve.steps, curve.values) for name, curve in curves.items()})
    gradients = {book.name: _last(book, "l2", "grad_output") for book in books}
    spreads = {book.name: _last(book, "std", "output") for book in books}
    return losses, layer_lines(gradients, "gradient norm"), layer_lines(spreads, "standard deviation")


def _last(book: Book, field: str, port: str) -> tuple[list[str], list[float | None]]:
    sheet = book.sheet(field, port)
    return sheet.paths, sheet.row(-1)


def _findings(books: list[Book]) -> list[Component]:
    return [
        html.Div(
            [
                html.H3(dcc.Link(printable(book.name), href=address(book.name))),
                *(
                    [card(book.name, found, book.layers()) for found in book.run.findings]
                    or [html.P("Nothing found.", className="quiet")]
                ),
            ]
        )
        for book in books
    ]
