"""Pieces of pages: links, pills, cards of findings, graphs that keep their state when they are updated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, urlencode

from dash import dcc, html
from dash.development.base_component import Component

from torchhook.core.findings import Finding, Severity
from torchhook.render.words import printable
from torchhook.training.runs import Run

EVERY = 1000  # milliseconds between two looks for what is new
_STATES = {"running": "info", "interrupted": "info", "ended": "passed"}  # others are errors
PAGES = {"": "Overview", "layers": "Layers", "flow": "Gradient flow", "graph": "Model"}


def address(run: str, page: str = "", **query: str) -> str:
    """Where a page of a run is.

    >>> address("net-1", "layer", path="a/b <c>")
    '/run/net-1/layer?path=a%2Fb+%3Cc%3E'
    """
    place = "/".join(["/run", quote(run, safe=""), *([page] if page else [])])
    return f"{place}?{urlencode(query)}" if query else place


def layer_link(run: str, path: str, **more: Any) -> Component:
    """A link to the page of a layer."""
    return dcc.Link(printable(path) or "the model", href=address(run, "layer", path=path), **more)


def pill(kind: str, text: str) -> Component:
    """A word in colour, which says the same without."""
    return html.Span(text, className=f"pill {kind}")


def state_of(run: Run) -> tuple[str, str]:
    """How a run is, for a `pill`: one in which an error was found did not end well."""
    state, errors = run.state, sum(finding.severity == Severity.ERROR for finding in run.findings)
    if errors:
        return "error", f"{state} with {errors} error{'s' * (errors > 1)}"
    return _STATES.get(state, "error"), state


def card(run: str, finding: Finding, layers: Iterable[str], cause: Finding | None = None) -> Component:
    """A finding, with a link to its layer; or, if it comes of another one, to that one's."""
    layers = list(layers)
    at = _layer_of(finding.site, layers)
    where = html.Code(printable(finding.site) or "the model")
    step = "" if finding.step is None else f"step {finding.step:,}"
    affected = f"and {len(finding.affected)} more that come of it" if finding.affected else ""
    return html.Article(
        [
            html.P(
                [pill(str(finding.severity), str(finding.severity)), html.B(finding.code), html.Span(step)],
                className="tags",
            ),
            html.H3(printable(finding.message)),
            html.P([dcc.Link(where, href=address(run, "layer", path=at)) if at is not None else where, f" {affected}"]),
            html.P(printable(finding.hint) if cause is None else _because(run, cause, layers), className="quiet"),
        ],
        className=f"card {finding.severity}",
    )


def _because(run: str, cause: Finding, layers: list[str]) -> list[Any]:
    at = _layer_of(cause.site, layers)
    place = printable(cause.site) or "the model"
    return [f"It comes of {cause.code} at ", place if at is None else layer_link(run, at), ": start there."]


def graph(id_: str, figure: Any, label: str) -> Component:
    """A figure that can be patched. `label` says what is on it to those who do not see it."""
    config = {"displaylogo": False, "displayModeBar": False, "responsive": True}
    picture = dcc.Graph(id=id_, figure=figure, config=config, className="graph")
    return html.Figure(
        [picture, html.Figcaption(label, id=f"{id_}-caption", className="quiet")], role="group", **{"aria-label": label}
    )


def tick(id_: str, every: int = EVERY) -> Component:
    """Asks for what is new, again and again."""
    return dcc.Interval(id=id_, interval=every)


def section(title: str, *children: Any, note: str = "") -> Component:
    """A part of a page, with its title."""
    return html.Section([html.H2(title), *([html.P(note, className="quiet")] if note else []), *children])


def choice(id_: str, label: str, options: Iterable[str], value: str) -> Component:
    """One of several, by keyboard and by mouse."""
    chooser = dcc.Dropdown(list(options), value, id=id_, clearable=False)
    first = f"{id_}-value-count"  # the name of a menu that begins with this one: where many can be chosen, how many are
    return html.Label([html.Span(label, id=first), chooser], className="choice")


def _layer_of(site: str, layers: list[str]) -> str | None:
    """The layer that a site is of: itself, or what a parameter belongs to."""
    owner = site.rpartition(".")[0]
    return site if site in layers else owner if owner in layers else None
