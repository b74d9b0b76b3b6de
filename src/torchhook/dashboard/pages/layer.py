"""One layer through the training: how its values are distributed, its gradients and updates, its feature maps."""

from __future__ import annotations

from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, card, graph, section, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import curves, quantile_bands, update_curves
from torchhook.render.words import printable

_PICTURES = 6
_FIGURES = ("layer-output", "layer-zeros", "layer-gradients", "layer-updates", "layer-bands")


def page(book: Book, path: str) -> Component:
    """As of now."""
    kind = book.layers().get(path)
    if kind is None:
        return html.P(f"Nothing was measured at {printable(path)!r} in this run.")
    output, zeros, gradients, updates, bands = _figures(book, path)
    return html.Div(
        [
            tick("layer-tick"),
            dcc.Store(id="layer-shown", data={"run": book.name, "path": path, "stamp": book.stamp()}),
            html.H2([html.Code(printable(path)), " ", html.Span(printable(kind), className="quiet")]),
            _neighbours(book, path),
            html.Div(_found(book, path), id="layer-findings"),
            html.Div(
                [
                    section(
                        "Output", graph("layer-output", output, "Standard deviation and mean of absolutes, by step.")
                    ),
                    section("Zeros", graph("layer-zeros", zeros, "The share of zeros in the output, by step.")),
                    section(
                        "Distribution",
                        graph("layer-bands", bands, "Quantiles of the output, by step, where histograms were taken."),
                    ),
                    section("Gradients", graph("layer-gradients", gradients, "Norms of the gradients, by step.")),
                    section(
                        "Updates",
                        graph(
                            "layer-updates",
                            updates,
                            "How far a step moves each parameter, relative to its size. Healthy: 1e-5 to 3e-2.",
                        ),
                    ),
                ],
                className="columns",
            ),
            section("Feature maps", html.Div(_pictures(book, path), id="layer-pictures", className="pictures")),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """All is drawn anew when there is something new: of one layer that is little."""

    @app.callback(
        *[Output(name, "figure") for name in _FIGURES],
        Output("layer-findings", "children"),
        Output("layer-pictures", "children"),
        Output("layer-shown", "data"),
        Input("layer-tick", "n_intervals"),
        State("layer-shown", "data"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any]) -> Any:
        book, path = library.book(shown["run"]), shown["path"]
        stamp = book.stamp()
        if stamp == shown["stamp"]:
            return (no_update,) * (len(_FIGURES) + 3)
        return *_figures(book, path), _found(book, path), _pictures(book, path), {**shown, "stamp": stamp}


def _figures(book: Book, path: str) -> tuple[Any, ...]:
    def line(field: str, port: str, at: str = path) -> tuple[list[int], list[float | None]]:
        sheet = book.sheet(field, port)
        return sheet.steps, sheet.line(at)

    parameters = book.parameters(path)
    gradients = {"of the output": line("l2", "grad_output")} | {
        name: line("l2", "param_grad", name) for name in parameters
    }
    ratios = {name: line("mean", "update_ratio", name) for name in parameters}
    steps, quantiles = book.quantiles(path)
    return (
        curves({"std": line("std", "output"), "mean of absolutes": line("abs_mean", "output")}, "output"),
        curves({"zeros": line("zero_fraction", "output")}, "share of zeros", log=False).update_yaxes(
            range=[-0.02, 1.02]
        ),
        curves(_some(gradients), "gradient norm"),
        update_curves(_some(ratios)),
        quantile_bands(steps, quantiles),
    )


def _some(named: dict[str, tuple[list[int], list[float | None]]]) -> dict[str, tuple[list[int], list[float | None]]]:
    return {name: (steps, values) for name, (steps, values) in named.items() if values}


def _neighbours(book: Book, path: str) -> Component:
    layers = list(book.layers())
    number = layers.index(path)
    before = (
        [dcc.Link("← the layer before", href=address(book.name, "layer", path=layers[number - 1]))] if number else []
    )
    after = (
        [dcc.Link("the layer after →", href=address(book.name, "layer", path=layers[number + 1]))]
        if number + 1 < len(layers)
        else []
    )
    return html.P([*before, *after], className="tags")


def _found(book: Book, path: str) -> list[Component]:
    layers = book.layers()
    return [card(book.name, found, layers, book.cause_of(found)) for found in book.findings_at(path)]


def _pictures(book: Book, path: str) -> Any:
    samples = [sample for sample in book.run.samples if sample.path == path][-_PICTURES:]
    if not samples:
        return html.P("None were taken of this layer: they are taken of some convolutions.", className="quiet")
    return [
        html.Figure(
            [
                html.Img(
                    src=f"{address(book.name, 'samples')}/{sample.file.name}",
                    alt=f"Feature maps of {printable(path)} at step {sample.step}",
                ),
                html.Figcaption(f"step {sample.step:,}, from {sample.low:.3g} to {sample.high:.3g}", className="quiet"),
            ]
        )
        for sample in samples
    ]
