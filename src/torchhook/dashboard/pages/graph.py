"""The model page: a graph of layers that zooms, pans and folds by block, coloured by findings or any statistic."""

from __future__ import annotations

from collections.abc import Callable, Collection
from statistics import median
from typing import Any

import dash_cytoscape  # type: ignore[import-untyped]
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from torchhook.dashboard.folding import above, blocks, drawn_wires, seen_as, unfolded_first
from torchhook.dashboard.library import Library
from torchhook.dashboard.parts import address, choice, named, section, tick, tree, tree_data, waiting
from torchhook.dashboard.sheets import Book, worst_in
from torchhook.render.figures import heatmap_rows
from torchhook.render.figures.style import ODD, ink_on, odd_kind, shade
from torchhook.render.palette import GREEN, GREY, PAGES, SEVERITY
from torchhook.render.words import printable
from torchhook.training.runs.fields import NAMES

dash_cytoscape.load_extra_layouts()

Paint = Callable[[str, list[str]], str]
"""The colour of a node, by its path and the layers in it."""

_FINDINGS = "findings"
_SMALL = 20  # nodes and wires that are seen at once
_COLOURS = {_FINDINGS: "Findings"} | {
    f"{field} of {port}": named(field, port) for port in ("output", "grad_output") for field in NAMES
}
_ARIA = {"role": "img", "aria-label": "Graph of the layers; the list below has the same layers"}

# The script is half a megabyte, and no other page needs it.
_LOAD = """
async () => {
  if (!window.dash_cytoscape) await new Promise((loaded) => {
    const script = document.createElement("script");
    script.src = document.getElementById("later").content.querySelector("script").src;
    script.onload = loaded;
    document.head.append(script);
  });
  delete window.dash_cytoscape.Cytoscape.defaultProps.wheelSensitivity;  // its own default makes it warn
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}
"""
_FIT = """
() => {
  const cy = document.getElementById("graph-picture")?._cyreg?.cy.fit(undefined, 20);
  if (cy?.zoom() > 1) cy.zoom(1).center();
  return "fit";
}
"""

# A layout that does not fit begins at the left edge: the graph goes to the middle once it has its places.
_CENTRE = """
async () => {
  const drawn = () => document.getElementById("graph-picture")?._cyreg?.cy;
  while (document.getElementById("graph-box") && !drawn()?.nodes().length) await new Promise(requestAnimationFrame);
  const cy = drawn(), box = cy?.elements().renderedBoundingBox();
  if (box && box.w < cy.width()) cy.panBy({ x: (cy.width() - box.x1 - box.x2) / 2, y: 0 });
  cy?.on("layoutstop", () => {  // what was folded may be a speck now
    const now = cy.elements().renderedBoundingBox();
    if (now.w < cy.width() / 2 && now.h < cy.height() / 2) cy.fit(undefined, 20);
    if (cy.zoom() > 1) cy.zoom(1).center();
  });
  return "";
}
"""


def page(book: Book) -> Component:
    """The page in its current state; the graph comes when its script is loaded."""
    return html.Div(
        [
            dcc.Store(
                id="graph-shown",
                data={"run": book.name, "stamp": book.stamp(), "open": unfolded_first(list(book.layers()))},
            ),
            dcc.Store(id="graph-theme"),
            waiting(html.Div(id="graph-box"), target_components={"graph-box": "children"}),
            section("Layers", tree(book)),
        ]
    )


def register(app: Dash, library: Library) -> None:
    """Load the script, then draw; fold and unfold; keep colours up to date."""
    app.clientside_callback(_LOAD, Output("graph-theme", "data"), Input("graph-theme", "id"))
    app.clientside_callback(
        _FIT, Output("graph-fit", "value"), Input("graph-fit", "n_clicks"), prevent_initial_call=True
    )
    app.clientside_callback(
        _CENTRE, Output("graph-box", "className"), Input("graph-box", "children"), prevent_initial_call=True
    )

    @app.callback(
        Output("graph-box", "children"),
        Input("graph-theme", "data"),
        State("graph-shown", "data"),
        prevent_initial_call=True,
    )
    def _(theme: str, shown: dict[str, Any]) -> Any:
        return _box(*_drawn(library.book(shown["run"]), shown["open"], _FINDINGS), theme == "dark")

    @app.callback(
        Output("graph-picture", "elements"),
        Output("graph-legend", "children"),
        Output("tree-shown", "data"),
        Output("graph-shown", "data"),
        Input("graph-tick", "n_intervals"),
        Input("graph-colour", "value"),
        Input("graph-unfold", "n_clicks"),
        Input("graph-fold", "n_clicks"),
        Input("graph-picture", "tapNode"),
        State("graph-shown", "data"),
        running=[(Output("graph-tick", "disabled"), True, False)],  # else a tick takes the place of a click before it
        prevent_initial_call=True,
    )
    def _(_: int, colour: str, _all: int, _none: int, tapped: dict[str, Any] | None, shown: dict[str, Any]) -> Any:
        book = library.book(shown["run"])
        stamp, open_, layers = book.stamp(), set(shown["open"]), book.layers()
        if ctx.triggered_id == "graph-tick" and stamp == shown["stamp"]:
            return (no_update,) * 4
        if not shown["stamp"][0]:  # nothing was known of the model
            open_ = set(unfolded_first(list(layers)))
        if ctx.triggered_id == "graph-unfold":
            open_ = set(blocks(layers))
        elif ctx.triggered_id == "graph-fold":
            open_ = set()
        elif ctx.triggered_id == "graph-picture" and tapped and tapped["data"]["block"]:
            open_ ^= {tapped["data"]["path"]}
        listed = no_update if stamp[2:] == shown["stamp"][2:] else tree_data(book)
        return *_drawn(book, open_, colour), listed, {**shown, "stamp": stamp, "open": sorted(open_)}

    @app.callback(
        Output("url", "href", allow_duplicate=True),
        Input("graph-picture", "tapNode"),
        State("graph-shown", "data"),
        prevent_initial_call=True,
    )
    def _(tapped: dict[str, Any] | None, shown: dict[str, Any]) -> Any:
        if not tapped or tapped["data"]["block"]:
            return no_update
        return address(shown["run"], "layer", path=tapped["data"]["path"])


def _box(elements: list[dict[str, Any]], legend: list[Any], is_dark: bool) -> list[Component]:
    picture = dash_cytoscape.Cytoscape(
        id="graph-picture",
        elements=elements,
        layout={"name": "dagre", "rankDir": "TB", "nodeSep": 70, "rankSep": 60, "fit": len(elements) < _SMALL},
        zoom=0.9,
        pan={"x": 40, "y": 40},
        minZoom=0.05,
        maxZoom=2,
        boxSelectionEnabled=False,
        autoungrabify=True,
        responsive=True,
        style={"width": "100%", "height": "100%"},
        stylesheet=_style(is_dark),
    )
    buttons = {"graph-unfold": "Unfold all", "graph-fold": "Fold all", "graph-fit": "Fit"}
    controls = [html.Button(text, id=id_) for id_, text in buttons.items()]
    return [
        tick("graph-tick"),
        html.Div([choice("graph-colour", "colour", _COLOURS, _FINDINGS), *controls], className="choices"),
        html.Div(picture, className="model", **_ARIA),
        html.P(legend, id="graph-legend", className="quiet"),
        html.P("Click a layer to open it, a block to fold or unfold it.", className="quiet"),
    ]


def _drawn(book: Book, unfolded: Collection[str], colour: str) -> tuple[list[dict[str, Any]], list[Any]]:
    """The elements of the graph, and what the colours mean."""
    layers, shapes, sizes = book.layers(), book.run.shapes, blocks(book.layers())
    kinds = book.run.containers | layers
    seen: dict[str, list[str]] = {}
    for path in layers:
        seen.setdefault(seen_as(path, unfolded), []).append(path)
    paint, legend = _by_finding(book) if colour == _FINDINGS else _by_statistic(book, *colour.split(" of "))
    frames = [
        _node(path, kinds.get(path, ""), "block") for path in dict.fromkeys(block for at in seen for block in above(at))
    ]
    nodes = [
        _node(path, f"{kinds.get(path, '')} ({sizes[path]} layers)", "folded", paint(path, some))
        if path in sizes
        else _node(path, kinds[path], "layer", paint(path, some))
        for path, some in seen.items()
    ]
    wires: dict[tuple[str, str], str] = {}
    for source, path in drawn_wires(book.sources(), list(layers)):
        ends = seen_as(source, unfolded), seen_as(path, unfolded)
        if ends[0] != ends[1]:
            is_told = any(shape == shapes.get(source) for (start, _), shape in wires.items() if start == ends[0])
            wires.setdefault(ends, "" if is_told else shapes.get(source, ""))  # once at each node
    edges = [
        {"data": {"source": f"n{source}", "target": f"n{target}", "shape": printable(shape)}}
        for (source, target), shape in wires.items()
    ]
    return [*frames, *nodes, *edges], legend


def _node(path: str, fact: str, kind: str, fill: str = "") -> dict[str, Any]:
    outer, _, name = path.rpartition(".")
    lines = [printable(name) or "the model", printable(fact)]
    look = {"text": ("\n" if fill else " ").join(lines), "wide": 16 + 7 * max(map(len, lines)), "fill": fill}
    facts = {"id": f"n{path}", "path": path, "block": kind != "layer", "ink": ink_on(fill) if fill else "", **look}
    return {"data": {**facts, "parent": f"n{outer}"} if outer else facts, "classes": kind}


def _by_finding(book: Book) -> tuple[Paint, list[Any]]:
    colours, health = {"": GREEN, **SEVERITY}, book.health()
    return lambda path, _: colours[worst_in(path, health)], _legend({"nothing found": GREEN, **SEVERITY})


def _by_statistic(book: Book, field: str, port: str) -> tuple[Paint, list[Any]]:
    """The last value of a layer as a colour; a folded block has the median of its layers."""
    sheet = book.sheet(field, port)
    row = book.rows(sheet, len(sheet.steps) - 1)[0] if sheet.steps else []
    values = dict(zip(sheet.paths, row, strict=False))
    heights = dict(zip(sheet.paths, heatmap_rows(field, [row])[0], strict=False))
    known = sorted((height, values[path]) for path, height in heights.items() if height is not None)
    low, high = (known[0][0], known[-1][0]) if known else (0.0, 1.0)

    def paint(_: str, layers: list[str]) -> str:
        odd = {odd_kind(values.get(path)) for path in layers if heights.get(path) is None}
        some = [height for path in layers if (height := heights.get(path)) is not None]
        if "not finite" in odd or not some:
            return next(ODD[kind] for kind in ("not finite", "zero", "not measured") if kind in odd)
        return shade((median(some) - low) / (high - low) if high > low else 0.5)

    ends = {f"{known[0][1]:.3g}": shade(0.0), f"{known[-1][1]:.3g}": shade(1.0)} if known else {}
    step = f" at step {sheet.steps[-1]:,}" if sheet.steps else ""
    return paint, [f"{named(field, port)}{step}: ", *_legend({**ends, **ODD})]


def _legend(colours: dict[str, str]) -> list[Any]:
    return [
        part
        for name, colour in colours.items()
        for part in (html.Span(className="swatch", style={"background": colour}), f"{name} ")
    ]


def _style(is_dark: bool) -> list[dict[str, Any]]:
    ink, paper = PAGES["dark" if is_dark else "light"]
    text = {"color": ink, "text-background-color": paper, "text-background-opacity": 0.85, "font-size": 11}
    node = {"label": "data(text)", "text-wrap": "wrap", "font-family": "system-ui, sans-serif", "font-size": 12}
    box = {"background-color": "data(fill)", "color": "data(ink)", "width": "data(wide)", "height": 38}
    frame = {"background-color": GREY, "background-opacity": 0.08, "border-color": GREY, "padding": "24px"}
    edge = {"curve-style": "bezier", "width": 1.5, "line-color": GREY, "target-arrow-color": GREY}
    ends = {"target-arrow-shape": "triangle", "source-label": "data(shape)", "source-text-offset": 12}
    styles = {
        "node": {**node, "shape": "round-rectangle", "text-valign": "center"},
        ".layer, .folded": box,
        ".folded": {"border-width": 3, "border-style": "double", "border-color": ink},
        ".block": {**text, **frame, "text-valign": "top"},
        "edge": {**text, **edge, **ends},
    }
    return [{"selector": selector, "style": style} for selector, style in styles.items()]
