"""Mosaics: the feature maps of layers and the attention of their heads, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.core.tap import require_count
from torchhook.plot.arrays import ARRAY, finite, numbers, reach, share_below
from torchhook.plot.given import Layer, first_sample, maps_of
from torchhook.plot.mosaic import Mosaic
from torchhook.plot.style import SMALL, colour_bar, colour_scale, colours, label, new_figure, page, place, thinned
from torchhook.render.palette import GREY, ZERO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAP, _HEAD = 96, 256  # pixels of a map and of a head: more would not be visible side by side
_LAYERS, _ACROSS = 16, 12  # rows of a figure of several layers, and tiles in each
_WIDTH, _TILE = 9.0, 1.8  # inches, at most: of such a row, and of a tile in it


def feature_maps(x: Any, *, most: int = 32, ax: Axes | None = None) -> Figure:
    """The channels of a layer's output side by side, and before them their mean.

    Each map has its own scale, which ignores outliers. If any value is negative, zero is white, negative values are
    blue and positive ones red; otherwise the lowest value is darkest. A map of zeros, as of a dead channel, is loud,
    any other constant map is grey, with its value beside the channel number. Values that are not finite have a colour
    of their own, and the caption says how many there are.

    Args:
        x: ``[C, H, W]``, or ``[N, C, H, W]``, of which the first sample is drawn; one layer of a capture,
            ``acts["layer1"]``; or several layers, a row each: a capture, or a dict of names and arrays.
        most: Draw only the first `most` channels; of several layers, at most 11 of each. The mean is that of all.

    >>> feature_maps(torch.randn(8, 64, 14, 14)).axes[0].get_title()
    'first of 8 samples, 32 of 64 channels'
    """
    require_count(most, "most")
    layers = maps_of(x)
    if len(layers) == 1:
        return _draw_maps(layers[0], most, ax)
    shown = min(_ACROSS - 1, most, max(layer.values.shape[-3] for layer in layers))
    return _in_rows(layers, lambda layer, ax: _draw_maps(layer, shown, ax, shown + 1), shown + 1, ax, "x")


def attention(maps: Any, *, tokens: Sequence[object] | None = None, ax: Axes | None = None) -> Figure:
    """The attention of each head, all heads of a layer on one scale: rows are queries, columns are keys.

    For long sequences, a pixel shows the largest of several weights.

    Args:
        maps: ``[heads, q, k]``, or ``[batch, heads, q, k]``, of which the first sample is drawn; one attention that
            `torchhook.explain.attention` saw, ``seen[0]``; or several, a row each: ``seen``, or ``seen["encoder.**"]``.
        tokens: Names of the keys, and of the queries if there are as many.

    >>> figure = attention(torch.randn(12, 5, 5).softmax(-1), tokens="the cat sat on it".split())
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['head 0', 'head 1']
    """
    calls = [maps] if _is_call(maps) else maps if _are_calls(maps) else None
    taken = f"{ARRAY}, or what torchhook.explain.attention saw"
    if calls is None:
        return _draw_heads(Layer("", "", numbers(maps, "maps", taken)), tokens, ax)
    if len(calls) == 1:
        return _draw_heads(_of_call(calls[0]), tokens, ax)
    shown = min(_ACROSS, max(call.shape[1] for call in calls))
    return _in_rows(calls, lambda call, ax: _draw_heads(_of_call(call), tokens, ax, shown), shown, ax, "maps")


def _is_call(value: Any) -> bool:
    """Whether it is one attention that was seen, as far as a plot needs it."""
    return all(hasattr(type(value), name) or hasattr(value, name) for name in ("weights", "path", "shape"))


def _are_calls(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and all(map(_is_call, value))


def _of_call(call: Any) -> Layer:
    return Layer(call.path, "", call.weights)


def _in_rows(
    layers: Sequence[Any], draw: Callable[[Any, Axes], Figure], columns: int, ax: Axes | None, argument: str
) -> Figure:
    """One row of tiles per layer, evenly chosen if there are many."""
    if ax is not None:
        raise ValueError(f"ax has room for one layer, and {argument} has {len(layers)}: pass one of them")
    count = min(len(layers), _LAYERS)
    chosen = [layers[round(number * (len(layers) - 1) / (count - 1))] for number in range(count)]
    tile = min(_TILE, _WIDTH / columns)
    figure = new_figure(columns * tile + 1.5, count * (tile + 0.55))
    for number, layer in enumerate(chosen):
        draw(layer, figure.add_subplot(count, 1, number + 1))
    if count < len(layers):
        figure.suptitle(f"{count} of {len(layers)} layers", fontsize=SMALL)
    return figure


def _draw_maps(layer: Layer, most: int, ax: Axes | None, columns: int | None = None) -> Figure:
    whole = first_sample(layer, "x")
    channels = whole[:most]
    names = [*["mean"] * (len(whole) > 1), *range(len(channels))]
    maps = torch.cat([whole.mean(0, keepdim=True), channels])[-len(names) :]
    signed = bool((finite(maps) < 0).any())
    mosaic = Mosaic.of(torch.stack([_scaled(some, signed) for some in _small(maps)]), columns)
    figure, ax = place(ax, *page(mosaic.shape, mosaic.columns * 1.1))
    broken = (~maps.isfinite()).sum((1, 2)).tolist()
    flat = _constant(maps)
    remarks = [
        f": {count} not finite" if count else f": all {flat[number]:.2g}" if number in flat else ""
        for number, count in enumerate(broken)
    ]
    captions = [f"{name}{remark}" for name, remark in zip(names, remarks, strict=True)]
    mosaic.draw(ax, colours(signed), captions, {number: GREY if value else ZERO for number, value in flat.items()})
    ax.set_title(_title(layer, len(channels), "channels"), fontsize=SMALL)
    ax.set_xlabel(f"{maps.shape[1]} × {maps.shape[2]} positions, each map on its own scale", fontsize=SMALL)
    return figure


def _draw_heads(layer: Layer, tokens: Sequence[object] | None, ax: Axes | None, columns: int | None = None) -> Figure:
    needed, remedy = "[heads, q, k] or [batch, heads, q, k]", "for a single head, pass maps[None]"
    heads = finite(first_sample(layer, "maps", needed, remedy))
    queries, keys = heads.shape[1:]
    if tokens is not None and len(tokens) != keys:
        raise ValueError(
            f"tokens must have {keys} names, one per key of maps of shape {list(layer.values.shape)}, not {len(tokens)}"
        )
    stride = math.ceil(max(queries, keys) / _HEAD)
    mosaic = Mosaic.of(F.max_pool2d(heads[:columns, None], stride, ceil_mode=True)[:, 0], columns)
    figure, ax = place(ax, *page(mosaic.shape, mosaic.columns * 2.2, beside=1.2))
    scale = colour_scale(heads)
    mosaic.draw(ax, scale.to_rgba, [f"head {number}" for number in range(len(mosaic.tiles))])
    if tokens is not None:
        _name_tokens(ax, mosaic, tokens, stride, queries == keys)
    ax.set_title(_title(layer, len(mosaic.tiles), "heads"), fontsize=SMALL)
    ax.set_xlabel("key", fontsize=SMALL)
    ax.set_ylabel("query", fontsize=SMALL)
    colour_bar(ax, scale, "weight")
    return figure


def _title(layer: Layer, drawn: int, what: str) -> str:
    """The layer, and what part of it is drawn, if not all of it."""
    *samples, parts, _, _ = layer.values.shape
    first = [f"first of {samples[0]} samples"] if samples and samples[0] > 1 else []
    some = [f"{drawn} of {parts} {what}"] if drawn < parts else []
    return ", ".join([*filter(None, [label(layer.title)]), *first, *some])


def _constant(maps: Tensor) -> dict[int, float]:
    """The values of constant maps, by channel; NaN and infinity are ignored, and maps of one pixel do not count."""
    if maps[0].numel() < 2:
        return {}
    known = {number: some[some.isfinite()] for number, some in enumerate(maps)}
    return {number: float(some[0]) for number, some in known.items() if len(some) and bool((some == some[0]).all())}


def _small(maps: Tensor) -> Tensor:
    """Large maps, subsampled so that pixels that are not finite stay visible."""
    stride = math.ceil(max(maps.shape[1:]) / _MAP)
    broken = F.max_pool2d((~maps.isfinite()).double()[:, None], stride, ceil_mode=True)[:, 0] > 0
    return maps[:, ::stride, ::stride].masked_fill(broken, math.nan)


def _scaled(some: Tensor, signed: bool) -> Tensor:
    """A map scaled to [0, 1], with zero in the middle if it is `signed`."""
    if signed:
        return (0.5 + 0.5 * some / reach(some)).clamp(0, 1)
    low = share_below(some, 0.01)
    high = next((end for share in (0.99, 1.0) if (end := share_below(some, share)) > low), None)
    return some * 0 + 0.5 * (low > 0) if high is None else ((some - low) / (high - low)).clamp(0, 1)


def _name_tokens(ax: Axes, mosaic: Mosaic, tokens: Sequence[object], stride: int, in_rows: bool) -> None:
    """Names to the left of every row of heads and below the last one, as many as fit."""
    chosen = thinned(len(tokens), len(tokens) / stride * mosaic.pixel(ax))
    middles = [(number + 0.5) / stride - 0.5 for number in chosen]
    names = [label(tokens[number]) for number in chosen]
    columns = [mosaic.corner(number)[1] + middle for number in range(mosaic.columns) for middle in middles]
    ax.set_xticks(columns, names * mosaic.columns, fontsize=SMALL, rotation=90)
    if in_rows:
        tops = [mosaic.corner(row * mosaic.columns)[0] for row in range(mosaic.rows)]
        ax.set_yticks([top + middle for top in tops for middle in middles], names * mosaic.rows, fontsize=SMALL)
    ax.tick_params(length=0)
