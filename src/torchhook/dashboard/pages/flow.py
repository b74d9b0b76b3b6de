"""The gradient flow page: the gradient norm of each layer at a chosen step, first at the step of the worst finding."""

from __future__ import annotations

import math
from bisect import bisect_left
from operator import itemgetter
from typing import Any

from dash import Dash, Input, Output, State, dcc, html
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import followed, graph, slider, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import layer_lines

_PORTS = {"grad_output": "Norm of each layer's output gradient", "param_grad": "Norm of each parameter's gradient"}
_CAPTION = "in execution order, on a log scale. Triangles mark zeros, crosses what is not finite."

# Keep the step in the URL, so that it can be shared, without reloading the page.
_ADDRESS = """
(number, { steps }) => {
  if (steps.length) history.replaceState(history.state, "", "?step=" + steps[Math.min(number, steps.length - 1)]);
  return null;
}
"""


def page(book: Book, step: int | None = None) -> Component:
    """The page at a step, by default that of the worst finding, or the last one."""
    steps = book.sheet("l2", "grad_output").steps
    wanted, last = _faulty(book) if step is None else step, max(0, len(steps) - 1)
    number = last if wanted is None else min(bisect_left(steps, wanted), last)  # the step before is not yet faulty
    return html.Div(
        [
            tick("flow-tick"),
            dcc.Store(id="flow-shown", data={"run": book.name, "steps": steps}),
            dcc.Store(id="flow-address"),
            slider("flow-step", "step", last, number, text=_step_text(book, steps, number)),
            *[
                graph(f"flow-{port}", figure(book, port, number), f"{name}, {_CAPTION}")
                for port, name in _PORTS.items()
            ],
        ]
    )


def register(app: Dash, library: Library) -> None:
    """The slider chooses the step, which is in the URL then; at the end, it follows new steps."""
    app.clientside_callback(
        _ADDRESS,
        Output("flow-address", "data"),
        Input("flow-step", "value"),
        State("flow-shown", "data"),
        prevent_initial_call=True,
    )

    @app.callback(
        *[Output(f"flow-{port}", "figure") for port in _PORTS],
        Output("flow-step-text", "children"),
        Input("flow-step", "value"),
        State("flow-shown", "data"),
        prevent_initial_call=True,
    )
    def _(number: int, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        return *[figure(book, port, number) for port in _PORTS], _step_text(book, shown["steps"], number)

    @app.callback(
        Output("flow-step", "max"),
        Output("flow-step", "value"),
        Output("flow-shown", "data"),
        Input("flow-tick", "n_intervals"),
        State("flow-step", "value"),
        State("flow-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, number: int, shown: dict[str, Any]) -> Any:
        return followed(library.book(shown["run"]).sheet("l2", "grad_output").steps, number, shown)


def figure(book: Book, port: str, number: int) -> Any:
    """The gradient norms at the step at position `number` of the slider."""
    sheet = book.sheet("l2", port)
    at = min(number, len(sheet.steps) - 1)
    rows = book.rows(sheet, at, at + 1) if sheet.steps else [[]]
    return layer_lines({port: (sheet.paths, rows[0])}, "gradient norm")


def _faulty(book: Book) -> int | None:
    """The step of the worst finding; if no finding has a step, the first one at which the gradients differ most."""
    step, sheet = book.faulty_step(), book.sheet("l2", "grad_output")
    if step is not None or not any(finding.severity > "info" for finding in book.run.findings):
        return step
    return max(zip(map(_reach, book.rows(sheet)), sheet.steps, strict=True), key=itemgetter(0), default=(0, None))[1]


def _reach(row: list[float | None]) -> float:
    """How many times the smallest of some norms the largest is; infinite if one is zero or not finite."""
    known = [value for value in row if value is not None]
    if not all(map(math.isfinite, known)):
        return math.inf
    low, high = min(known, default=1.0), max(known, default=1.0)
    return high / low if low else math.inf


def _step_text(book: Book, steps: list[int], number: int) -> str:
    if not steps:
        return "nothing measured yet"
    step = steps[min(number, len(steps) - 1)]
    codes = dict.fromkeys(finding.code for finding in book.found() if finding.step == step)
    found = f"{', '.join(codes)} {'was' if len(codes) == 1 else 'were'} found"
    return f"step {step:,}, where {found}" if codes else f"step {step:,}"
