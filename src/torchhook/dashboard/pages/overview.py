"""The overview page of a run: its loss, its findings, and the health of each layer."""

from __future__ import annotations

import time
from typing import Any

from dash import Dash, Input, Output, Patch, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.core.findings import Report, Severity
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import card, graph, layer_link, pill, section, state_of, tick
from torchhook.dashboard.sheets import Book, Curve, worst_in
from torchhook.render.figures import loss_curve, not_measured
from torchhook.render.words import printable


def page(book: Book) -> Component:
    """The page in its current state."""
    curve = book.curve()
    figure = _loss(book, curve)
    shown = {"run": book.name, "stamp": book.stamp(), "edition": curve.edition, "points": len(curve.steps)}
    return html.Div(
        [
            tick("overview-tick"),
            dcc.Store(id="overview-shown", data=shown),
            html.Div(_facts(book), id="overview-facts"),
            html.Div(
                [
                    section(
                        "Loss", graph("overview-loss", figure, "Loss by step. Dotted lines and diamonds mark findings.")
                    ),
                    section("Findings", html.Div(_findings(book), id="overview-findings", **{"aria-live": "polite"})),
                ],
                className="columns",
            ),
            section(
                "Layers",
                html.Div(_tree(book), id="overview-tree"),
                note="In execution order. Click a layer to open it.",
            ),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Keep the page up to date."""

    @app.callback(
        Output("overview-loss", "figure"),
        Output("overview-facts", "children"),
        Output("overview-findings", "children"),
        Output("overview-tree", "children"),
        Output("overview-shown", "data"),
        Input("overview-tick", "n_intervals"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        stamp, curve = book.stamp(), book.curve()
        if stamp == shown["stamp"] and len(curve.steps) == shown["points"]:
            return (no_update,) * 5
        found = stamp[2] != shown["stamp"][2]
        is_first = all(value is None for value in curve.values[: shown["points"]])
        if found or is_first or curve.edition != shown["edition"]:
            figure: Any = _loss(book, curve)
        else:
            figure = Patch()
            figure["data"][0]["x"].extend(curve.steps[shown["points"] :])
            figure["data"][0]["y"].extend(curve.values[shown["points"] :])
        now = {**shown, "stamp": stamp, "edition": curve.edition, "points": len(curve.steps)}
        is_new_model = not shown["stamp"][0] and stamp[0]
        tree = _tree(book) if found or is_new_model else no_update
        return figure, _facts(book), _findings(book) if found else no_update, tree, now


def _loss(book: Book, curve: Curve) -> Any:
    losses = {step: loss for step, loss in zip(curve.steps, curve.values, strict=True) if loss is not None}
    return loss_curve(Report(tuple(book.run.findings), losses=losses)) or not_measured()


def _facts(book: Book) -> list[Component]:
    run, steps = book.run, book.run.steps
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    progress = f"measured up to step {steps[-1]:,}" if steps else "nothing measured yet"
    settings = ", ".join(
        f"{name} {printable(str(run.about[name]))}" for name in ("optimizer", "every") if run.about.get(name)
    )
    return [
        html.P([pill(*state_of(run)), html.B(progress), html.Span(f"started {started}")], className="tags"),
        html.P([printable(run.model), f"; {settings}" if settings else ""], className="quiet"),
    ]


def _findings(book: Book) -> list[Component]:
    found = sorted(book.run.findings, key=lambda finding: -finding.severity.rank)
    layers = book.layers()
    if not found:
        return [html.P("Nothing found so far.", className="quiet")]
    return [card(book.name, finding, layers) for finding in found[:50]]


def _tree(book: Book) -> Component:
    """The tree of modules, expanded where something was found."""
    nested: dict[str, Any] = {}
    for path in book.layers():
        inside = nested
        for part in path.split("."):
            inside = inside.setdefault(part, {})
    return html.Ul(_branches(book.name, nested, "", book.layers(), book.health()), className="tree")


def _branches(
    run: str, nested: dict[str, Any], above: str, layers: dict[str, str], health: dict[str, Severity]
) -> list[Component]:
    branches = []
    for name, inside in nested.items():
        path = f"{above}.{name}" if above else name
        worst = worst_in(path, health)
        dot = html.Span(
            className=f"dot {worst or 'healthy'}",
            title=worst or "nothing found",
            role="img",
            **{"aria-label": worst or "healthy"},
        )
        if inside:
            below = html.Ul(_branches(run, inside, path, layers, health))
            branches.append(
                html.Li(html.Details([html.Summary([dot, printable(name)]), below], open=bool(worst) or above == ""))
            )
        else:
            kind = html.Span(printable(layers.get(path, "")), className="quiet")
            branches.append(html.Li([dot, layer_link(run, path), " ", kind]))
    return branches
