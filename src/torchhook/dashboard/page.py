"""One self-contained page of what is not a run: values, statistics, a report, or the result of another verb."""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from torchhook.captures.hook_manager import HookManager
from torchhook.captures.pictures import png
from torchhook.captures.result import Calls, Capture
from torchhook.core.errors import NotRecordedError
from torchhook.core.findings import Report
from torchhook.core.result import Result
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves
from torchhook.plot.arrays import finite, numbers
from torchhook.plot.given import Layer, first_sample, layers_of, maps_of
from torchhook.render.figures.values import boxes, plane
from torchhook.render.palette import NONFINITE
from torchhook.render.tables import tables
from torchhook.render.tags import text
from torchhook.render.to_html import document, html, plot, plots
from torchhook.rules.check import layers_of as measured_layers
from torchhook.rules.model_diagnostics import ModelDiagnostics
from torchhook.stats import Histogram, Moments
from torchhook.stats.reading import Snapshot
from torchhook.stats.result import Stats

TAKEN = (
    "a model, a monitor, a run or a folder of runs; a capture, a dict of names and arrays, the result of measure(),"
    " a report, or another result of torchhook"
)
_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_BOXES = "Whiskers from 1 % to 99 % of the values, boxes from 25 % to 75 %, and the median."
_MAPS = 24  # layers whose maps are shown
_SIDE = 64  # positions of a mean map


def page_of(what: Any) -> str:
    """The page of `what`, in HTML.

    >>> page = page_of({"conv": numbers([[[0.0, 1.0], [2.0, 3.0]]], "x")})
    >>> "<h2>Feature maps</h2>" in page, "<code>conv</code>" in page
    (True, True)
    """
    if isinstance(what, (Report, Result)):
        return html(what)
    if isinstance(what, (Stats, Snapshot)):
        return _of_stats(what.snapshot() if isinstance(what, Stats) else what)
    if isinstance(what, (HookManager, ModelDiagnostics)):
        what = what.get_all() if isinstance(what, HookManager) else what.features
    if isinstance(what, (Calls, Mapping)):
        return _of_values(what)
    if hasattr(what, "_repr_html_"):
        return _of_result(what)
    raise TypeError(f"what must be {TAKEN}; not {what!r:.80}")


def _of_values(what: Any) -> str:
    layers = layers_of(what, "what")
    if not layers:
        raise ValueError("there is nothing to show: no value was recorded yet")
    rows = [_row(layer, _gradient(what, layer.path)) for layer in layers]
    report = Report(layers=tuple(rows))
    spread = {
        row["site"]: quantiles for row, layer in zip(rows, layers, strict=True) if (quantiles := _quantiles(row, layer))
    }
    drawn = {"Distributions": (boxes(spread, "value"), _BOXES)}
    parts = {"Feature maps": _maps(what), "Layers": tables(report)}
    title = "Capture" if isinstance(what, Capture) else "Values"
    return _page(title, f"{len(layers)} layers", {"Plots": plots(report, drawn), **parts})


def _of_stats(snapshot: Snapshot) -> str:
    if not len(snapshot):
        raise ValueError("there is nothing to show: nothing was measured yet")
    report = Report(layers=measured_layers(snapshot))
    found: dict[str, dict[str, list[float]]] = {}
    for path, port in snapshot:
        reading = snapshot[path, port]
        if Histogram.name in reading and len(reading.histogram().counts):
            found.setdefault(port, {})[path] = [reading.quantile(q) for q in _QUANTILES]
    drawn = {f"Distribution of {port}": (boxes(spread, port), _BOXES) for port, spread in found.items()}
    return _page("Statistics", f"{len(snapshot)} places", {"Plots": plots(report, drawn), "Layers": tables(report)})


def _of_result(what: Any) -> str:
    table = f'<div class="scroll" role="region" aria-label="Table" tabindex="0">{what._repr_html_()}</div>'
    return _page(type(what).__name__, "", {"Table": table})


def _page(title: str, note: str, parts: Mapping[str, str]) -> str:
    header = f'<p class="quiet">torchhook</p><h1>{text(title)}</h1><p class="quiet">{text(note)}</p>'
    return document(f"{title} {note}".strip(), header, parts, "plain")


def _row(layer: Layer, gradient: float | None) -> dict[str, Any]:
    said = Moments().of(numbers(layer.values, "what"))
    numbers_of = {name: getattr(said, name) for name in ("mean", "std", "min", "max", "zero_fraction", "nonfinite")}
    shape = {"site": layer.path, "kind": "module", "module": layer.kind or None, "shape": shape_of(layer.values)}
    return {**shape, **numbers_of, "grad_norm": gradient}


def _gradient(what: Any, path: str) -> float | None:
    """The root mean square of the gradient at a captured layer."""
    calls = what if isinstance(what, Calls) else what[path] if isinstance(what, Capture) else None
    with suppress(NotRecordedError):
        for _, gradient in leaves(calls.grad) if calls is not None else ():
            return math.sqrt(float(numbers(gradient, "what").square().mean()))
    return None


def _quantiles(row: Mapping[str, Any], layer: Layer) -> list[float]:
    """Some quantiles of the finite values; none if there are no such values."""
    bins = Histogram().of(numbers(layer.values, "what"))
    return [min(max(bins.quantile(q), row["min"]), row["max"]) for q in _QUANTILES] if len(bins.counts) else []


def _maps(what: Any) -> str:
    """A card for each layer with feature maps, evenly chosen if there are many."""
    try:
        layers = maps_of(what, "what")
    except ValueError:
        return ""
    count = min(len(layers), _MAPS)
    chosen = [layers[round(number * (len(layers) - 1) / max(1, count - 1))] for number in range(count)]
    left_out = f'<p class="quiet">{count} of {len(layers)} layers</p>' if count < len(layers) else ""
    return left_out + "".join(_card(layer) for layer in chosen if layer.values.dim() in (3, 4))


def _card(layer: Layer) -> str:
    maps = first_sample(layer, "what")
    channels, high, wide = maps.shape
    shown = (
        f"Channels of the first sample, each from black (its smallest value) to white: {channels} of {high} × {wide}."
    )
    picture = f'<img alt="Feature maps of {text(layer.path)}" src="{_source(png(maps, NONFINITE))}">'
    return plot(layer.title or "maps", plane(_rows(maps.mean(0)), "mean of channels"), shown, picture)


def _rows(values: Tensor) -> Sequence[Sequence[float | None]]:
    stride = math.ceil(max(values.shape) / _SIDE)
    return [
        [value if math.isfinite(value) else None for value in row]
        for row in finite(values)[::stride, ::stride].tolist()
    ]


def _source(data: bytes) -> str:
    return f"data:image/png;base64,{b64encode(data).decode()}"
