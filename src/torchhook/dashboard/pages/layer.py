"""The page of one layer: its output, gradients, updates and feature maps over the training."""

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
    """The page in its current state."""
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
            html.Div(_cards(book, path), id="layer-findings"),
            html.Div(
                [
                    section(
                        "Output",
                        graph(
                            "layer-output", output, "Standard deviation and mean absolute value of the output, by step."
                        ),
                    ),
                    section("Zeros", graph("layer-zeros", zeros, "Share of zeros in the output, by step.")),
                    section(
                        "Distribution",
                        graph("layer-bands", bands, "Quantiles of the output, at the steps that have histograms."),
                    ),
                    section("Gradients", graph("layer-gradients", gradients, "Gradient norms by step.")),
                    section(
                        "Updates",
                        graph(
                            "layer-updates",
                            updates,
                            "Size of each update relative to its parameter, by step. Healthy: 1e-5 to 3e-2 (shaded).",
                        ),
                    ),
                ],
                className="columns",
            ),
            section("Feature maps", html.Div(_pictures(book, path), id="layer-pictures", className="pictures")),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Redraw everything when there is something new; for one layer that is cheap."""

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
        return *_figures(book, path), _cards(book, path), _pictures(book, path), {**shown, "stamp": stamp}


def _figures(book: Book, path: str) -> tuple[Any, ...]:
    def line(field: str, port: str, at: str = path) -> tuple[list[int], list[float | None]]:
        sheet = book.sheet(field, port)
        return sheet.steps, sheet.line(at)

    parameters = book.parameters(path)
    gradients = {"output gradient": line("l2", "grad_output")} | {
        name: line("l2", "param_grad", name) for name in parameters
    }
    ratios = {name: line("mean", "update_ratio", name) for name in parameters}
    steps, quantiles = book.quantiles(path)
    return (
        curves({"std": line("std", "output"), "mean absolute value": line("abs_mean", "output")}, "output"),
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
    before = [dcc.Link("← previous layer", href=address(book.name, "layer", path=layers[number - 1]))] if number else []
    after = (
        [dcc.Link("next layer →", href=address(book.name, "layer", path=layers[number + 1]))]
        if number + 1 < len(layers)
        else []
    )
    return html.P([*before, *after], className="tags")


def _cards(book: Book, path: str) -> list[Component]:
    layers = book.layers()
    return [card(book.name, found, layers, book.cause_of(found)) for found in book.findings_at(path)]


def _pictures(book: Book, path: str) -> Any:
    samples = [sample for sample in book.run.samples if sample.path == path][-_PICTURES:]
    if not samples:
        return html.P("No feature maps of this layer: they are kept only for some convolutions.", className="quiet")
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
