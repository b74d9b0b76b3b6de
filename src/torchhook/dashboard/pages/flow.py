"""The gradient flow page: the gradient norm of each layer at a chosen step."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import graph, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import layer_lines

_PORTS = {"grad_output": "Norm of each layer's output gradient", "param_grad": "Norm of each parameter's gradient"}


def page(book: Book) -> Component:
    """The page at the last step."""
    steps = book.sheet("l2", "grad_output").steps
    last = max(0, len(steps) - 1)
    slider = dcc.Slider(0, last, 1, value=last, id="flow-step", marks=None, updatemode="drag", allow_direct_input=False)
    return html.Div(
        [
            tick("flow-tick"),
            dcc.Store(id="flow-shown", data={"run": book.name, "steps": steps}),
            html.Label([html.Span(_step_text(steps, last), id="flow-step-text"), slider], className="choice slider"),
            *[
                graph(
                    f"flow-{port}",
                    figure(book, port, last),
                    f"{name}, in execution order, on a log scale. A triangle marks a zero.",
                )
                for port, name in _PORTS.items()
            ],
        ]
    )


def register(app: Dash, library: Library) -> None:
    """The slider chooses the step; at the end, it follows new steps."""

    @app.callback(
        *[Output(f"flow-{port}", "figure") for port in _PORTS],
        Output("flow-step-text", "children"),
        Input("flow-step", "value"),
        State("flow-shown", "data"),
        prevent_initial_call=True,
    )
    def _(number: int, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        return *[figure(book, port, number) for port in _PORTS], _step_text(shown["steps"], number)

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
        steps = library.book(shown["run"]).sheet("l2", "grad_output").steps
        if steps == shown["steps"]:
            return no_update, no_update, no_update
        last = max(0, len(steps) - 1)
        was_last = number >= len(shown["steps"]) - 1
        return last, last if was_last else no_update, {**shown, "steps": steps}


def figure(book: Book, port: str, number: int) -> Any:
    """The gradient norms at the step at position `number` of the slider."""
    sheet = book.sheet("l2", port)
    return layer_lines({port: (sheet.paths, sheet.row(min(number, len(sheet.steps) - 1)))}, "gradient norm")


def _step_text(steps: list[int], number: int) -> str:
    return f"step {steps[min(number, len(steps) - 1)]:,}" if steps else "nothing measured yet"
