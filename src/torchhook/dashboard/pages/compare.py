"""The comparison page: losses, gradients, activations and findings of several runs, and how two of them differ."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.core.errors import RunError
from torchhook.dashboard.library import OPEN, Library
from torchhook.dashboard.parts import address, card, choice, graph, section, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import heatmap, layer_lines, loss_curves, not_measured
from torchhook.render.words import printable

_LINES = {"gradients": ("l2", "grad_output", "gradient norm"), "spreads": ("std", "output", "standard deviation")}
_STATS = {
    "gradient norm": ("l2", "grad_output"),
    "standard deviation of the output": ("std", "output"),
    "relative update": ("mean", "update_ratio"),
}
_MARKS = "Triangles mark zeros, crosses what is not finite."
_DIFFERENCE = (
    "The second run's values divided by those of the first, by layer and step, on a log scale. What is zero in one of"
    " the two only is marked as zero."
)


def page(library: Library, names: list[str]) -> Component:
    """The page in its current state."""
    if not names:
        return html.P(["Choose the runs to compare in the ", dcc.Link("list of runs", href="/"), "."])
    books, errors = _opened(library, names)
    if not books:
        return html.Div(errors)
    losses, gradients, spreads = _figures(books)
    return html.Div(
        [
            tick("compare-tick"),
            dcc.Store(id="compare-shown", data={"runs": names, "stamp": _stamp(books)}),
            html.Div(errors, id="compare-errors"),
            section(
                "Loss",
                graph("compare-loss", losses, "Loss of each run by step. Crosses are losses that are not finite."),
            ),
            _difference_section(books),
            section(
                "Gradients",
                graph(
                    "compare-gradients",
                    gradients,
                    f"Norm of the output gradient of each layer, at the last step of each run. {_MARKS}",
                ),
            ),
            section(
                "Activations",
                graph(
                    "compare-spreads",
                    spreads,
                    f"Standard deviation of each layer's output, at the last step of each run. {_MARKS}",
                ),
            ),
            section("Findings", html.Div(_findings(books), id="compare-findings", className="columns")),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Redraw everything when there is something new, and the difference when other runs are chosen."""

    @app.callback(
        Output("compare-loss", "figure"),
        Output("compare-gradients", "figure"),
        Output("compare-spreads", "figure"),
        Output("compare-findings", "children"),
        Output("compare-errors", "children"),
        Output("compare-shown", "data"),
        Input("compare-tick", "n_intervals"),
        State("compare-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        books, errors = _opened(library, shown["runs"])
        stamp = _stamp(books)
        if stamp == shown["stamp"]:
            return (no_update,) * 6
        return *_figures(books), _findings(books), errors, {**shown, "stamp": stamp}

    @app.callback(
        Output("compare-difference", "figure"),
        Input("compare-first", "value"),
        Input("compare-second", "value"),
        Input("compare-stat", "value"),
        Input("compare-shown", "data"),
        prevent_initial_call=True,
    )
    def _(first: str, second: str, stat: str, _: Any) -> Any:
        try:
            return _difference(library.book(first), library.book(second), stat)
        except RunError:  # it is listed among the errors
            return not_measured()


def _opened(library: Library, names: Iterable[str]) -> tuple[list[Book], list[Component]]:
    """The runs that can be read, and a line for each of the others."""
    unique = list(dict.fromkeys(names))
    found = {name: _book(library, name) for name in unique[:OPEN]}
    found |= dict.fromkeys(unique[OPEN:], f"at most {OPEN} runs are compared at a time")
    books = [book for book in found.values() if isinstance(book, Book)]
    whys = {name: why for name, why in found.items() if isinstance(why, str)}
    return books, [
        html.P(f"{printable(name)} is left out: {printable(why)}", role="alert") for name, why in whys.items()
    ]


def _book(library: Library, name: str) -> Book | str:
    """The book of a run of which everything on this page can be read, or why it cannot."""
    try:
        book = library.book(name)
        for field, port in _STATS.values():
            book.sheet(field, port)
        book.curve(), book.layers(), book.stamp()
    except RunError as error:
        return str(error)
    return book


def _stamp(books: list[Book]) -> list[Any]:
    return [[book.name, *book.stamp()] for book in books]


def _figures(books: list[Book]) -> tuple[Any, Any, Any]:
    curves = {book.name: book.curve() for book in books}
    losses = loss_curves(
        {
            name: (curve.steps, [math.nan if value is None else value for value in curve.values])
            for name, curve in curves.items()
        }
    )
    return losses, *(_lines(books, *what) for what in _LINES.values())


def _lines(books: list[Book], field: str, port: str, title: str) -> Any:
    """A line per run over the layers of all runs, so that all lines have the same order."""
    last = {book.name: row for book in books for row in _table(book, field, port, 1).values()}
    paths = aligned(last.values())
    return layer_lines({name: (paths, [row.get(path) for path in paths]) for name, row in last.items()}, title)


def _table(book: Book, field: str, port: str, most: int | None = None) -> dict[int, dict[str, float | None]]:
    """A statistic by step and layer, of at most so many steps from the last one back."""
    sheet = book.sheet(field, port)
    first = 0 if most is None else max(0, len(sheet.steps) - most)
    rows = zip(sheet.steps[first:], book.rows(sheet, first), strict=True)
    return {step: dict(zip(sheet.paths, row, strict=True)) for step, row in rows}


def aligned(orders: Iterable[Iterable[str]]) -> list[str]:
    """All layers in one order, in which the layers of each run are in their order of execution.

    >>> aligned([["conv", "relu", "fc"], ["conv", "norm", "relu", "drop", "fc"]])
    ['conv', 'norm', 'relu', 'drop', 'fc']
    >>> aligned([["conv", "fc"], ["embed", "head"]])
    ['conv', 'fc', 'embed', 'head']
    """
    found = [list(order) for order in orders]
    before: dict[str, set[str]] = {path: set() for order in found for path in order}
    for order in found:
        for one, next_ in pairwise(order):
            before[next_].add(one)
    sorter, ready, merged = TopologicalSorter(before), list[str](), list[str]()
    try:
        sorter.prepare()
    except CycleError:  # they call the same layers in different orders
        return list(before)
    while sorter.is_active():
        ready += reversed(sorter.get_ready())
        merged.append(ready.pop())  # what follows the last one comes first, so that runs do not interleave
        sorter.done(merged[-1])
    return merged


def _difference_section(books: list[Book]) -> Component:
    """Which is hidden as long as there is only one run."""
    names, stat = [book.name for book in books], next(iter(_STATS))
    first, second = books[0], books[min(1, len(books) - 1)]
    choices = [
        choice("compare-first", "first run", names, first.name),
        choice("compare-second", "second run", names, second.name),
        choice("compare-stat", "statistic", list(_STATS), stat),
    ]
    drawn = graph("compare-difference", _difference(first, second, stat), _DIFFERENCE)
    shown = section("Difference", html.Div(choices, className="choices"), drawn)
    return html.Div(shown, hidden=len(books) < 2)


def _difference(first: Book, second: Book, stat: str) -> Any:
    """The ratio of two runs as a heat map of layers × steps, as far as both go."""
    one, other = (_table(book, *_STATS.get(stat, _STATS["gradient norm"])) for book in (first, second))
    last = min(max(one, default=-1), max(other, default=-1))
    pairs = {step: _nearest(list(other), step) for step in one if step <= last}
    if not pairs:
        return not_measured()
    paths = aligned(next(iter(table.values())) for table in (one, other))
    rows = [[_ratio(one[step].get(path), other[near].get(path)) for path in paths] for step, near in pairs.items()]
    if all(value is None for row in rows for value in row):
        return not_measured("no layer of one run was measured in the other")
    return heatmap("ratio", list(pairs), paths, rows)


def _nearest(steps: Sequence[int], step: int) -> int:
    after = bisect_left(steps, step)
    return min(steps[max(0, after - 1) : after + 1], key=lambda near: abs(near - step))


def _ratio(first: float | None, second: float | None) -> float | None:
    """How many times the first the second is; zero if one of them is, NaN if one is not finite."""
    if first is None or second is None:
        return None
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.nan
    if first <= 0 or second <= 0:
        return 1.0 if first == second else 0.0
    return second / first


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
