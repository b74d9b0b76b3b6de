"""Parts of pages: links, pills, cards of findings, graphs that keep their state when they are updated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, urlencode

from dash import dcc, html
from dash.development.base_component import Component

from torchhook.core.findings import Finding, Severity
from torchhook.render.words import printable
from torchhook.training.runs import Run

EVERY = 1000  # milliseconds between two updates
_STATES = {"running": "info", "interrupted": "info", "ended": "passed"}  # others are errors
PAGES = {"": "Overview", "layers": "Layers", "flow": "Gradient flow", "graph": "Model"}


def address(run: str, page: str = "", **query: str) -> str:
    """The URL of a page of a run.

    >>> address("net-1", "layer", path="a/b <c>")
    '/run/net-1/layer?path=a%2Fb+%3Cc%3E'
    """
    place = "/".join(["/run", quote(run, safe=""), *([page] if page else [])])
    return f"{place}?{urlencode(query)}" if query else place


def layer_link(run: str, path: str, **more: Any) -> Component:
    """A link to the page of a layer."""
    return dcc.Link(printable(path) or "the model", href=address(run, "layer", path=path), **more)


def pill(kind: str, text: str) -> Component:
    """A word in colour; the colour adds nothing to its meaning."""
    return html.Span(text, className=f"pill {kind}")


def state_of(run: Run) -> tuple[str, str]:
    """The state of a run, for a `pill`; errors that were found are part of it."""
    state, errors = run.state, sum(finding.severity == Severity.ERROR for finding in run.findings)
    if errors:
        return "error", f"{state} with {errors} error{'s' * (errors > 1)}"
    return _STATES.get(state, "error"), state


def card(run: str, finding: Finding, layers: Iterable[str], cause: Finding | None = None) -> Component:
    """A finding with a link to its layer, and to the layer of its `cause` if there is one."""
    layers = list(layers)
    at = _layer_of(finding.site, layers)
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
    at = _layer_of(cause.site, layers)
    place = printable(cause.site) or "the model"
    return [f"Caused by {cause.code} at ", place if at is None else layer_link(run, at), ": fix that first."]


def graph(id_: str, figure: Any, label: str) -> Component:
    """A figure that can be updated. `label` is its caption, and its description for screen readers."""
    config = {"displaylogo": False, "displayModeBar": False, "responsive": True}
    picture = dcc.Graph(id=id_, figure=figure, config=config, className="graph")
    return html.Figure(
        [picture, html.Figcaption(label, id=f"{id_}-caption", className="quiet")], role="group", **{"aria-label": label}
    )


def tick(id_: str, every: int = EVERY) -> Component:
    """A timer that triggers updates."""
    return dcc.Interval(id=id_, interval=every)


def section(title: str, *children: Any, note: str = "") -> Component:
    """A section of a page, with its title."""
    return html.Section([html.H2(title), *([html.P(note, className="quiet")] if note else []), *children])


def choice(id_: str, label: str, options: Iterable[str], value: str) -> Component:
    """A menu to choose one of several options."""
    chooser = dcc.Dropdown(list(options), value, id=id_, clearable=False)
    first = f"{id_}-value-count"  # the id with which Dash begins the accessible name of a menu
    return html.Label([html.Span(label, id=first), chooser], className="choice")


def _layer_of(site: str, layers: list[str]) -> str | None:
    """The layer of a site: the site itself, or the module that owns the parameter."""
    owner = site.rpartition(".")[0]
    return site if site in layers else owner if owner in layers else None
