"""Parts of pages: links, pills, cards of findings, the tree of modules, graphs that keep their state when updated."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from dash import dcc, html, no_update
from dash.development.base_component import Component

from torchhook.core.findings import Finding
from torchhook.dashboard.folding import above
from torchhook.dashboard.sheets import Book, worst_in
from torchhook.render.words import printable

_OPEN = 2  # levels of the tree of modules that are open
EVERY = 1000  # milliseconds between two updates
_STATES = {"running": "info", "interrupted": "info", "ended": "passed"}  # others are errors
PAGES = {"": "Overview", "layers": "Layers", "flow": "Gradient flow", "graph": "Model", "ranks": "Ranks"}


def address(run: str, page: str = "", *, kind: str = "run", **query: str) -> str:
    """The URL of a page of a run, or of a saved result if that is the `kind`.

    >>> address("net-1", "layer", path="a/b <c>")
    '/run/net-1/layer?path=a%2Fb+%3Cc%3E'
    """
    name = quote(os.fsencode(run), safe="")  # a name may be any bytes
    place = "/".join([f"/{kind}", name, *([page] if page else [])])
    return f"{place}?{urlencode(query)}" if query else place


def layer_link(run: str, path: str, **more: Any) -> Component:
    """A link to the page of a layer."""
    return dcc.Link(printable(path) or "the model", href=address(run, "layer", path=path), **more)


def pill(kind: str, text: str) -> Component:
    """A word in colour; the colour adds nothing to its meaning."""
    return html.Span(text, className=f"pill {kind}")


def state_of(state: str, errors: int) -> tuple[str, str]:
    """The state of a run, for a `pill`; errors that were found are part of it.

    >>> state_of("ended", 0), state_of("ended", 2)
    (('passed', 'ended'), ('error', 'ended with 2 errors'))
    """
    if errors:
        return "error", f"{state} with {errors} error{'s' * (errors > 1)}"
    return _STATES.get(state, "error"), state


def card(run: str, finding: Finding, layers: Iterable[str], cause: Finding | None = None) -> Component:
    """A finding with a link to its layer, and to the layer of its `cause` if there is one."""
    layers = list(layers)
    at = layer_of(finding.site, layers)
    where = html.Code(printable(finding.site) or "the model")
    step = "" if finding.step is None else f"step {finding.step:,}"
    module = f"({printable(finding.module)})" if finding.module else ""
    affected = f"and {len(finding.affected)} more caused by it" if finding.affected else ""
    return html.Article(
        [
            html.P(
                [pill(str(finding.severity), str(finding.severity)), html.B(finding.code), html.Span(step)],
                className="tags",
            ),
            html.H3(printable(finding.message)),
            html.P(
                [
                    dcc.Link(where, href=address(run, "layer", path=at)) if at is not None else where,
                    f" {module} {affected}",
                ]
            ),
            *(html.P(line, className="quiet") for line in _advice(run, finding, layers, cause)),
        ],
        className=f"card {finding.severity}",
    )


def _advice(run: str, finding: Finding, layers: list[str], cause: Finding | None) -> list[Any]:
    return list(map(printable, finding.advice)) if cause is None else [_caused_by(run, cause, layers)]


def _caused_by(run: str, cause: Finding, layers: list[str]) -> list[Any]:
    at = layer_of(cause.site, layers)
    place = html.Span(printable(cause.site) or "the model") if at is None else layer_link(run, at)
    module = f" ({printable(cause.module)})" if cause.module else ""
    return [f"Caused by {cause.code} at ", place, f"{module}: fix that first."]


def graph(id_: str, figure: Any, label: str) -> Component:
    """A figure that can be updated. `label` is its caption, and its description for screen readers."""
    config = {"displaylogo": False, "displayModeBar": False, "responsive": True}
    picture = waiting(dcc.Graph(id=id_, figure=figure, config=config, className="graph"))
    return html.Figure(
        [picture, html.Figcaption(label, id=f"{id_}-caption", className="quiet")], role="group", **{"aria-label": label}
    )


def waiting(child: Component, **options: Any) -> Component:
    """A part with a spinner on top of it while the server makes a new one, if that takes a while."""
    return dcc.Loading(child, delay_show=300, overlay_style={"visibility": "visible", "opacity": 0.6}, **options)


def tick(id_: str, every: int = EVERY) -> Component:
    """A timer that triggers updates."""
    return dcc.Interval(id=id_, interval=every)


def section(title: str, *children: Any, note: str = "") -> Component:
    """A section of a page, with its title."""
    return html.Section([html.H2(title), *([html.P(note, className="quiet")] if note else []), *children])


_STATS = {
    "count": "Number of values",
    "mean": "Mean",
    "std": "Standard deviation",
    "min": "Smallest value",
    "max": "Largest value",
    "l2": "Norm",
    "abs_mean": "Mean absolute value",
    "zero_fraction": "Share of zeros",
    "nonfinite": "Values that are not finite",
    "nan": "NaN values",
    "posinf": "+Inf values",
    "neginf": "-Inf values",
    "skewness": "Skewness",
    "kurtosis": "Kurtosis",
}
_PORTS = {
    "input": "each layer's input",
    "output": "each layer's output",
    "grad_input": "each layer's input gradient",
    "grad_output": "each layer's output gradient",
    "param": "each parameter",
    "param_grad": "each parameter's gradient",
}
_NUMBERS = {  # ports with one number per step, of which the mean is that number
    "param_norm": "Norm of each parameter",
    "param_grad_norm": "Norm of each parameter's gradient",
    "update_ratio": "Relative update of each parameter",
}


def named(stat: str, port: str) -> str:
    """A statistic at a port, in words.

    >>> named("std", "output"), named("mean", "update_ratio")
    ("Standard deviation of each layer's output", 'Relative update of each parameter')
    """
    return _NUMBERS.get(port) or f"{_STATS.get(stat, stat)} of {_PORTS.get(port, port)}"


def stats_named(stats: Iterable[str]) -> dict[str, str]:
    """The options of a menu of statistics."""
    return {stat: _STATS.get(stat, stat) for stat in stats}


def ports_named(ports: Iterable[str]) -> dict[str, str]:
    """The options of a menu of ports."""
    names = {port: _NUMBERS.get(port) or _PORTS.get(port, port) for port in ports}
    return {port: name[:1].upper() + name[1:] for port, name in names.items()}


def choice(id_: str, label: str, options: Iterable[str] | Mapping[str, str], value: str) -> Component:
    """A menu to choose one of several options, which may have names."""
    named = options if isinstance(options, Mapping) else {option: option for option in options}
    chooser = dcc.Dropdown(
        [{"value": option, "label": name} for option, name in named.items()], value, id=id_, clearable=False
    )
    first = f"{id_}-value-count"  # the id with which Dash begins the accessible name of a menu
    return html.Label([html.Span(label, id=first), chooser], className="choice")


def slider(id_: str, name: str, high: float, value: float, step: float = 1, text: str = "") -> Component:
    """A slider from 0 to `high`, under its name or a text."""
    bar = dcc.Slider(0, high, step, value=value, id=id_, marks=None, updatemode="drag", allow_direct_input=False)
    return html.Label([html.Span(text or name, id=f"{id_}-text"), bar], className="choice slider", title=name)


def followed(steps: list[int], number: int, shown: dict[str, Any]) -> tuple[Any, Any, Any]:
    """The end and the value of a slider over steps, and what its page remembers; at the end, it follows new steps."""
    if steps == shown["steps"]:
        return no_update, no_update, no_update
    last = max(0, len(steps) - 1)
    was_last = number >= len(shown["steps"]) - 1
    return last, last if was_last else no_update, {**shown, "steps": steps}


def layer_of(site: str, layers: Iterable[str]) -> str | None:
    """The layer of a site: the site itself, or the module that owns the parameter."""
    owner = site.rpartition(".")[0]
    return site if site in layers else owner if owner in layers else None


def tree(book: Book) -> Component:
    """The tree of modules. The browser makes it of plain data: thousands of components would make every update slow."""
    return html.Div([dcc.Store(id="tree-shown", data=tree_data(book)), html.Div(id="tree", className="tree")])


def tree_data(book: Book) -> list[Any]:
    """The modules, each with what is in it: folded by block, except on top and where something was found."""
    run, layers, health, shapes = book.run, book.layers(), book.health(), book.run.shapes
    facts = {path: f"{kind} → {shapes[path]}" if path in shapes else kind for path, kind in layers.items()}
    facts = run.containers | facts
    opened = {block for finding in run.findings for block in above(finding.site)}
    inside: dict[str, list[Any]] = {"": []}
    for path in (part for layer in layers for part in (*above(layer), layer)):
        if path in inside:
            continue
        inside[path] = []
        inside[path.rpartition(".")[0]].append(
            {
                "name": printable(path) or "the model",
                "fact": printable(facts.get(path, "")),
                "worst": worst_in(path, health),
                "open": path.count(".") < _OPEN or path in opened,
                "href": address(book.name, "layer", path=path) if path in layers else None,
                "inside": inside[path],
            }
        )
    return inside[""]
