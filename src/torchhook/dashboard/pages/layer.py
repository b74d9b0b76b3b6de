"""The page of one layer: its output, units, gradients, updates and feature maps over the training."""

from __future__ import annotations

import math
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, card, graph, section, slider, tick
from torchhook.dashboard.sheets import Book
from torchhook.render.figures import curves, distributions, layer_lines, update_curves
from torchhook.render.words import printable
from torchhook.training.runs.run import Sample

Line = tuple[list[int], list[float | None]]

_FIGURES = {
    "output": ("Output", "Standard deviation and mean absolute value of the output, by step."),
    "zeros": ("Zeros and dead units", "Share of zeros in the output, and of units that are never above zero, by step."),
    "bands": ("Distribution", "Boxes from 25 % to 75 % of the output, whiskers from 1 % to 99 %, where measured."),
    "units": ("Units by activity", "Mean absolute value of each unit, the most active first. Triangles mark zeros."),
    "gradients": ("Gradients", "Gradient norms by step. Triangles mark zeros, crosses what is not finite."),
    "updates": ("Updates", "Size of each update relative to its parameter. Healthy: 1e-5 to 3e-2 (shaded)."),
}


def page(book: Book, path: str) -> Component:
    """The page in its current state."""
    kind = book.layers().get(path)
    if kind is None:
        return html.P(f"Nothing was measured at {printable(path)!r} in this run.")
    plots = [
        section(title, graph(f"layer-{name}", figure, caption))
        for (name, (title, caption)), figure in zip(_FIGURES.items(), _figures(book, path), strict=True)
    ]
    shape = book.run.shapes.get(path)
    fact = printable(f"{kind} → {shape}" if shape else kind)
    return html.Div(
        [
            tick("layer-tick"),
            dcc.Store(id="layer-shown", data={"run": book.name, "path": path, "stamp": book.stamp()}),
            html.H2([html.Code(printable(path)), " ", html.Span(fact, className="quiet")]),
            _neighbours(book, path),
            html.Div(_cards(book, path), id="layer-findings"),
            html.Div(plots, className="columns"),
            section("Feature maps", *_maps(book, path)),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Redraw everything when there is something new; for one layer that is cheap."""

    @app.callback(
        *[Output(f"layer-{name}", "figure") for name in _FIGURES],
        Output("layer-findings", "children"),
        Output("layer-map-step", "max"),
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
        last = max(0, len(_samples(book, path)) - 1)
        return *_figures(book, path), _cards(book, path), last, {**shown, "stamp": stamp}

    @app.callback(
        Output("layer-pictures", "children"),
        Input("layer-map-step", "value"),
        Input("layer-map-step", "max"),
        State("layer-shown", "data"),
        prevent_initial_call=True,
    )
    def _(number: int, _: int, shown: dict[str, Any]) -> Any:
        return _picture(library.book(shown["run"]), shown["path"], number)


def _figures(book: Book, path: str) -> tuple[Any, ...]:
    parameters = book.parameters(path)
    gradients = {"output gradient": book.line("l2", "grad_output", path)} | {
        name: book.line("l2", "param_grad", name) for name in parameters
    }
    units = book.units(path)
    dead = [float((one.active_fraction == 0).double().mean()) for one in units.values()]
    shares: dict[str, Line] = {
        "zeros": book.line("zero_fraction", "output", path),
        "dead units": (list(units), [*dead]),
    }
    return (
        curves(
            {
                name: book.line(field, "output", path)
                for field, name in (("std", "std"), ("abs_mean", "mean absolute value"))
            },
            "output",
        ),
        curves(shares, "share", log=False).update_yaxes(range=[-0.02, 1.02]),
        distributions(*book.quantiles(path)),
        _activity(book, path),
        curves(gradients, "gradient norm"),
        update_curves({name: book.line("mean", "update_ratio", name) for name in parameters}),
    )


def _activity(book: Book, path: str) -> Any:
    """The units by their activity at the last step with units, and that at the first one."""
    units = book.units(path)
    if not units:
        return layer_lines({}, "")
    first, *_, last = *units, list(units)[-1]
    order = units[last].abs_mean.nan_to_num().argsort(descending=True).tolist()
    names = [f"unit {number}" for number in order]
    lines = {f"step {step:,}": (names, units[step].abs_mean[order].tolist()) for step in dict.fromkeys((last, first))}
    return layer_lines(lines, "mean absolute value")


def _neighbours(book: Book, path: str) -> Component:
    layers = list(book.layers())
    number = layers.index(path)
    near = {"← previous layer": number - 1, "next layer →": number + 1}
    links = [
        dcc.Link(f"{text} ({printable(layers[at])})", href=address(book.name, "layer", path=layers[at]))
        for text, at in near.items()
        if 0 <= at < len(layers)
    ]
    return html.Nav(links, className="tags near", **{"aria-label": "Layers before and after"})


def _cards(book: Book, path: str) -> list[Component]:
    layers = book.layers()
    return [card(book.name, found, layers, book.cause_of(found)) for found in book.findings_at(path)]


def _maps(book: Book, path: str) -> list[Component]:
    """The newest picture, and a slider through all; without pictures, the slider waits for the first one."""
    samples = _samples(book, path)
    last = max(0, len(samples) - 1)
    return [
        html.Div(slider("layer-map-step", "step", last, last), hidden=not samples),
        html.Div(_picture(book, path, last), id="layer-pictures", className="pictures"),
    ]


def _samples(book: Book, path: str) -> list[Sample]:
    return [sample for sample in book.run.samples if sample.path == path]


def _picture(book: Book, path: str, number: int) -> Component:
    samples = _samples(book, path)
    if not samples:
        return html.P("No feature maps of this layer: they are kept only for some convolutions.", className="quiet")
    sample = samples[min(number, len(samples) - 1)]
    source, text = f"{address(book.name, 'samples')}/{sample.file.name}", f"step {sample.step:,}"
    span = f"from {sample.low:.3g} to {sample.high:.3g}" if math.isfinite(sample.low) else "no value is finite"
    caption = html.Figcaption(f"{text}, {span}; orange: not finite", className="quiet")
    return html.Figure([html.Img(src=source, alt=f"Feature maps of {printable(path)} at {text}"), caption])
