"""The overview page of a run: what is wrong, the loss, the findings, and the health of each layer over time."""

from __future__ import annotations

import math
import time
from typing import Any

from dash import Dash, Input, Output, Patch, State, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.core.findings import Report, Severity
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import (
    address,
    card,
    graph,
    layer_of,
    pill,
    section,
    slider,
    state_of,
    tick,
    tree,
    tree_data,
)
from torchhook.dashboard.sheets import Book, Curve
from torchhook.render.figures import Stretch, health_map, layer_name, loss_curve, not_measured, smoothed
from torchhook.render.figures.curves import FAINT
from torchhook.render.palette import SEVERITY
from torchhook.render.words import counts, failure, printable, since
from torchhook.stats.downsample import spread
from torchhook.training.runs.schema import UNWRITTEN

_SMOOTHING, _RATES = 0.6, 500
_GROWN = 1.02  # times as many steps are worth another picture of the health
_CONSEQUENCE = 0.45  # opacity of what another finding explains
_BROKEN = {
    "failed": "the training failed",
    "killed": "the training was killed",
    UNWRITTEN: "the run could not be written to its end",
}


def page(book: Book) -> Component:
    """The page in its current state: what is seen first; `_rest` comes in a second answer."""
    curve, stamp = book.curve(), book.stamp()
    points = {"edition": curve.edition, "points": len(curve.steps)}
    caption = "Loss and learning rate by step. Diamonds are findings: click one to open its layer."
    losses = graph("overview-loss", _loss(book, curve, _SMOOTHING), caption)
    smoothing = slider("overview-smoothing", "smoothing", 0.99, _SMOOTHING, 0.01, _smoothing_text(_SMOOTHING))
    found = html.Div(_findings(book), id="overview-findings", tabIndex=0)
    return html.Div(
        [
            dcc.Store(id="overview-shown", data={"run": book.name, "stamp": stamp, "health": stamp[0], **points}),
            html.Div(_facts(book), id="overview-facts", **{"aria-live": "polite"}),
            html.Div([section("Loss", losses, smoothing), section("Findings", found)], className="columns"),
            html.Div(id="overview-rest"),
            section("Layers", tree(book), note="Class and shape of the output."),
        ]
    )


def _rest(book: Book) -> list[Component]:
    caption = (
        "What was found at each layer, from the step at which it was found; hatched: that step is not known;"
        " pale: explained by another finding."
    )
    return [
        tick("overview-tick"),
        section("Health over time", graph("overview-health", _health(book), caption)),
    ]


def register(app: Dash, library: Library) -> None:
    """Keep the page up to date; follow clicks and the slider."""

    @app.callback(Output("overview-rest", "children"), Input("overview-shown", "id"), State("overview-shown", "data"))
    def _(_: str, shown: dict[str, Any]) -> Any:
        return _rest(library.book(shown["run"]))

    @app.callback(
        Output("overview-loss", "figure"),
        Output("overview-facts", "children"),
        Output("overview-findings", "children"),
        Output("overview-health", "figure"),
        Output("tree-shown", "data"),
        Output("overview-shown", "data"),
        Input("overview-tick", "n_intervals"),
        State("overview-shown", "data"),
        State("overview-smoothing", "value"),
        prevent_initial_call=True,
    )
    def _(_: int, shown: dict[str, Any], smoothing: float) -> Any:
        book = library.book(shown["run"])
        stamp, curve, points = book.stamp(), book.curve(), shown["points"]
        if stamp == shown["stamp"] and len(curve.steps) == points:
            return (no_update,) * 6
        found, late = stamp[3] != shown["stamp"][3], curve.values[points:]
        is_first = all(value is None for value in curve.values[:points])
        if found or is_first or None in late or curve.edition != shown["edition"]:
            figure: Any = _loss(book, curve, smoothing)
        else:
            figure = _smooth(book, curve, smoothing)
            figure["data"][0]["x"].extend(curve.steps[points:])
            figure["data"][0]["y"].extend(late)
        now = {**shown, "stamp": stamp, "edition": curve.edition, "points": len(curve.steps)}
        has_new_layers = stamp[2] != shown["stamp"][2]
        grown = stamp[0] > _GROWN * shown["health"]
        if found or grown:
            now["health"] = stamp[0]
        health = _health(book) if found or grown else no_update
        listed = tree_data(book) if found or has_new_layers else no_update
        return figure, _facts(book), _findings(book) if found else no_update, health, listed, now

    @app.callback(
        Output("overview-loss", "figure", allow_duplicate=True),
        Output("overview-smoothing-text", "children"),
        Input("overview-smoothing", "value"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def _(smoothing: float, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        curve = book.curve()
        is_drawn = any(value is not None for value in curve.values)
        return _smooth(book, curve, smoothing) if is_drawn else no_update, _smoothing_text(smoothing)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("overview-loss", "clickData"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def _(click: dict[str, Any] | None, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        step = click["points"][0]["x"] if click else None
        found = [finding for finding in _worst_first(book) if since(finding) == step is not None]
        if not found:
            return no_update
        path = layer_of(found[0].site, book.layers())
        return address(book.name, "flow", step=str(step)) if path is None else address(book.name, "layer", path=path)

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("overview-health", "clickData"),
        State("overview-shown", "data"),
        prevent_initial_call=True,
    )
    def _(click: dict[str, Any] | None, shown: dict[str, Any]) -> Any:
        drawn = click["points"][0].get("y") if click else None
        path = next((path for path in library.book(shown["run"]).layers() if layer_name(path) == drawn), None)
        return no_update if path is None else address(shown["run"], "layer", path=path)


def _loss(book: Book, curve: Curve, smoothing: float) -> Any:
    losses = {s: math.nan if loss is None else loss for s, loss in zip(curve.steps, curve.values, strict=True)}
    report = Report(tuple(book.run.findings), losses=losses)
    return loss_curve(report, _rates(book), smoothing) or not_measured()


def _smooth(book: Book, curve: Curve, smoothing: float) -> Any:
    """A patch of the loss: its running mean, and the learning rates so far."""
    finite = [(step, loss) for step, loss in zip(curve.steps, curve.values, strict=True) if loss is not None]
    patch, rates = Patch(), _rates(book)
    patch["data"][0]["opacity"] = FAINT if smoothing else 1
    patch["data"][3]["x"] = [step for step, _ in finite]
    patch["data"][3]["y"] = smoothed([loss for _, loss in finite], smoothing) if smoothing else []
    if rates:
        patch["data"][4]["x"], patch["data"][4]["y"] = list(rates), list(rates.values())
    return patch


def _smoothing_text(smoothing: float) -> str:
    return f"smoothing {smoothing:g}"


def _rates(book: Book) -> dict[int, float]:
    rates = book.run.rates
    return {step: rates[step] for step in dict.fromkeys([*spread(list(rates), _RATES), *list(rates)[-1:]])}


def _health(book: Book) -> Any:
    run, layers = book.run, list(book.layers())
    if not run.steps or not layers:
        return not_measured()
    first, last = run.steps[0], max(run.last_step or 0, run.steps[-1]) + 1
    found: dict[tuple[str, str], Stretch] = {}  # of several findings of one severity at a layer, the first
    for root in run.findings:
        for finding in (root, *root.affected):
            path, start = layer_of(finding.site, layers), since(finding)
            start = since(root) if start is None else start  # a consequence is not older than its cause
            if path is not None:
                text = f"{finding.code}{', step not known' if start is None else f' from step {start:,}'}"
                begin, opacity = first if start is None else start, 1.0 if finding is root else _CONSEQUENCE
                bar = Stretch(path, begin, last, f"{text}: {printable(finding.message)}", opacity, start is not None)
                known = found.get((str(finding.severity), path), bar)
                found[str(finding.severity), path] = min(known, bar, key=lambda bar: (-bar.opacity, bar.start))
    return health_map(
        layers, (first, last), {name: [bar for (at, _), bar in found.items() if at == name] for name in SEVERITY}
    )


def _facts(book: Book) -> list[Component]:
    run, steps = book.run, book.run.steps
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started))
    progress = f"measured up to step {steps[-1]:,}" if steps else "nothing measured yet"
    named = {"optimizer": "optimizer {}", "every": "measured every {} steps"}
    settings = ", ".join(
        text.format(printable(str(run.about[name]))) for name, text in named.items() if run.about.get(name)
    ).replace("every 1 steps", "every step")
    watching = run.about.get("watching")
    state = state_of(run.state, Report(tuple(run.findings)).count(Severity.ERROR))
    return [
        _verdict(book),
        html.P(
            [
                pill(*state),
                html.B(progress),
                html.Span(f"started {started}"),
            ],
            className="tags",
        ),
        html.P(
            [
                printable(run.model),
                f"; {settings}" if settings else "",
                f"; {printable(str(watching))}" if watching else "",
            ],
            className="quiet",
        ),
    ]


def _verdict(book: Book) -> Component:
    """What is wrong, in one sentence, or that nothing is."""
    found, steps, broken = _worst_first(book), len(book.run.steps), _BROKEN.get(book.run.state)
    if broken and not any(finding.severity > "info" for finding in found):
        raised = failure(book.run.report or Report())
        text = f"Nothing wrong was found in {steps:,} measured steps, but {broken}{f': {raised}' if raised else '.'}"
        return html.P(text, className="said error")
    if not found:
        text = f"Nothing is wrong, as far as {steps:,} measured steps show." if steps else "Nothing was measured yet."
        return html.P(text, className="said passed" if steps else "said")
    first, path = found[0], layer_of(found[0].site, book.layers())
    said: list[Any] = ["" if first.severity > "info" else "Nothing is wrong; "]
    said.append(f"{counts(Report(tuple(found)))}: ")
    where: Any = printable(first.place)
    if path is not None:
        where = dcc.Link(where, href=address(book.name, "layer", path=path))
    message = printable(first.message)
    if not first.site:
        said.append(message)
    elif message.startswith("its "):  # of the layer, which has to be named first
        said += ["at ", where, f", the {message.removeprefix('its ')}"]
    else:
        said += [f"{message}, at ", where]
    return html.P([*said, "."], className=f"said {first.severity}")


def _worst_first(book: Book) -> list[Any]:
    return sorted(book.run.findings, key=lambda finding: -finding.severity.rank)


def _findings(book: Book) -> list[Component]:
    found, layers = _worst_first(book), book.layers()
    if not found:
        return [html.P("Nothing found so far.", className="quiet")]
    return [card(book.name, finding, layers) for finding in found[:50]]
