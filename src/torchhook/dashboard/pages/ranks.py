"""The ranks page: what each of several ranks says, and a heat map of layers × ranks for any statistic at a step."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.development.base_component import Component

from torchhook.core.tabular import short
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import choice, followed, graph, ports_named, section, slider, stats_named, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import heatmap, not_measured
from torchhook.render.words import printable
from torchhook.rules.ranks import TABLE, RankStep

_FACTS = {"loss": "loss", "grad_norm": "norm of its gradients", "seconds": "seconds per forward pass"}


def page(book: Book) -> Component:
    """The page at the step of the worst finding, or else at the last step with numbers of layers."""
    steps = _steps(book)
    if not steps:
        return html.P("One process trained alone: there are no ranks.")
    number = _first_shown(book, steps)
    known = book.run.rank_step(steps[number])
    ports = list(dict.fromkeys(port for _, port in known.places)) or ["output"]
    return html.Div(
        [
            tick("ranks-tick"),
            dcc.Store(id="ranks-shown", data={"run": book.name, "steps": steps}),
            slider("ranks-step", "step", len(steps) - 1, number, text=f"step {steps[number]:,}"),
            section("Ranks", html.Div(_table(known), id="ranks-table", className="scroll")),
            html.Div(
                [
                    choice("ranks-port", "measured at", ports_named(ports), ports[0]),
                    choice("ranks-stat", "statistic", stats_named(TABLE), "std"),
                ],
                className="choices",
            ),
            graph("ranks-heat", figure(known, ports[0], "std"), "Layers × ranks. Each column is a rank."),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Follow the slider and the choices; at the end, the slider follows new steps."""

    @app.callback(
        Output("ranks-heat", "figure"),
        Output("ranks-table", "children"),
        Output("ranks-step-text", "children"),
        Input("ranks-step", "value"),
        Input("ranks-port", "value"),
        Input("ranks-stat", "value"),
        State("ranks-shown", "data"),
        prevent_initial_call=True,
    )
    def _(number: int, port: str, stat: str, shown: dict[str, Any]) -> Any:
        step = shown["steps"][min(number, len(shown["steps"]) - 1)]
        known = library.book(shown["run"]).run.rank_step(step)
        return figure(known, port, stat), _table(known), f"step {step:,}"

    @app.callback(
        Output("ranks-step", "max"),
        Output("ranks-step", "value"),
        Output("ranks-shown", "data"),
        Input("ranks-tick", "n_intervals"),
        State("ranks-step", "value"),
        State("ranks-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, number: int, shown: dict[str, Any]) -> Any:
        return followed(_steps(library.book(shown["run"])), number, shown)


def _steps(book: Book) -> list[int]:
    """The steps to choose from; what is known from before the first step is of no step."""
    return [step for step in book.run.rank_steps if step >= 0]


def _first_shown(book: Book, steps: list[int]) -> int:
    """The position of the step of the worst finding; if it has no numbers of layers, of the last one that has."""
    wanted, last = book.faulty_step(), len(steps) - 1
    faulty = [] if wanted is None else [min(bisect_left(steps, wanted), last)]
    numbers = [*faulty, *range(last, -1, -1)]
    return next((number for number in numbers if book.run.rank_step(steps[number]).tables), last)


def figure(known: RankStep, port: str, stat: str) -> Any:
    """One statistic of all layers on all ranks; of some steps, such as the last one, only the losses are known."""
    if not known.tables:
        return not_measured()
    here = [number for number, (_, at) in enumerate(known.places) if at == port]
    rows = [[_drawn(table[number, TABLE.index(stat)]) for number in here] for table in known.tables.values()]
    drawn = heatmap(stat, list(known.tables), [known.places[number][0] for number in here], rows, along="rank")
    return drawn.update_xaxes(tick0=0, dtick=max(1, len(rows) // 16))


def _drawn(value: Any) -> float | None:
    return None if math.isnan(value) else float(value)


def _table(known: RankStep) -> Component:
    """One row per rank: where it is, how far it got, and what it said."""
    names = ["rank", "host", "stage", "state", "last step", *_FACTS.values()]
    rows = [
        [
            str(rank),
            printable(member.host),
            str(member.stage),
            member.state or "running",
            str(max(member.seen, 0)),
            *(short(known.facts.get(rank, {}).get(fact, "")) for fact in _FACTS),
        ]
        for rank, member in known.members.items()
    ]
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in names]))
    return html.Table([head, html.Tbody([html.Tr([html.Td(cell) for cell in row]) for row in rows])])
