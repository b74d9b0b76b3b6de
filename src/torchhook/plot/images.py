"""Images: the feature maps of a layer, the attention of its heads, a heat map over an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.core.optional import require
from torchhook.core.tap import require_count
from torchhook.plot.arrays import finite, numbers, reach, share_below
from torchhook.plot.mosaic import Mosaic
from torchhook.plot.style import SMALL, colour_bar, colours, label, page, place, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAP, _HEAD = 96, 256  # pixels of a map and of a head: more would not be visible side by side
_CHANNELS = (1, 3, 4)  # of an image


def feature_maps(x: Any, *, most: int = 32, ax: Axes | None = None) -> Figure:
    """The channels of a layer's output, side by side: ``[C, H, W]``, or the first sample of ``[N, C, H, W]``.

    Each map has its own scale, which ignores outliers. If any value is negative, zero is white, negative values are
    blue and positive ones red; otherwise the lowest value is darkest. A constant map, as of a dead channel, is grey,
    with its value beside the channel number. Values that are not finite have a colour of their own, and the caption
    says how many there are. Only the first `most` channels are drawn.

    >>> feature_maps(torch.randn(8, 64, 14, 14)).axes[0].get_title()
    'first of 8 samples, 32 of 64 channels'
    """
    require_count(most, "most")
    given = numbers(x, "x")
    whole = _of_one(given, "x", "[C, H, W] or [N, C, H, W]", "reshape it, for example x.view(C, H, W)")
    maps = whole[:most]
    signed = bool((finite(maps) < 0).any())
    mosaic = Mosaic.of(torch.stack([_scaled(some, signed) for some in _small(maps)]))
    figure, ax = place(ax, *page(mosaic.shape, mosaic.columns * 1.1))
    broken = (~maps.isfinite()).sum((1, 2)).tolist()
    flat = _constant(maps)
    remarks = [
        f"{count} not finite" if count else f"all {flat[n]:.2g}" if n in flat else "" for n, count in enumerate(broken)
    ]
    captions = [f"{number}: {remark}" if remark else f"{number}" for number, remark in enumerate(remarks)]
    mosaic.draw(ax, colours(signed), captions, flat)
    ax.set_title(_scope(given, len(maps), "channels"), fontsize=SMALL)
    return figure


def attention(maps: Any, *, tokens: Sequence[object] | None = None, ax: Axes | None = None) -> Figure:
    """The attention of each head: ``[heads, q, k]``, or the first sample of ``[batch, heads, q, k]``; all on one scale.

    Rows are queries, columns are keys. `tokens` names the keys, and the queries if there are as many. For long
    sequences, a pixel shows the largest of several weights.

    >>> figure = attention(torch.randn(12, 5, 5).softmax(-1), tokens="the cat sat on it".split())
    >>> [text.get_text() for text in figure.axes[0].texts][:2]
    ['head 0', 'head 1']
    """
    given = numbers(maps, "maps")
    heads = _of_one(
        finite(given), "maps", "[heads, q, k] or [batch, heads, q, k]", "for a single head, pass maps[None]"
    )
    queries, keys = heads.shape[1:]
    if tokens is not None and len(tokens) != keys:
        raise ValueError(
            f"tokens must have {keys} names, one per key of maps of shape {list(given.shape)}, not {len(tokens)}"
        )
    stride = math.ceil(max(queries, keys) / _HEAD)
    mosaic = Mosaic.of(F.max_pool2d(heads[:, None], stride, ceil_mode=True)[:, 0])
    figure, ax = place(ax, *page(mosaic.shape, mosaic.columns * 2.2, beside=1.2))
    scale = _scale(heads)
    mosaic.draw(ax, scale.to_rgba, [f"head {number}" for number in range(len(heads))])
    if tokens is not None:
        _name_tokens(ax, mosaic, tokens, stride, queries == keys)
    ax.set_title(_scope(given, len(heads), "heads"), fontsize=SMALL)
    colour_bar(ax, scale)
    return figure


def cam(image: Any, heat: Any, *, ax: Axes | None = None) -> Figure:
    """A heat map over its image: the hotter, the more opaque.

    Args:
        image: ``[C, H, W]`` or ``[H, W, C]`` with 1, 3 or 4 channels, or ``[H, W]``; bytes, or floats in [0, 1].
            Floats outside that range, as in a normalised image, are rescaled to it.
        heat: ``[h, w]``, of any size: it is resized to the image. Colours go from violet to yellow, or from blue to red
            if any value is negative.

    >>> figure = cam(torch.rand(3, 32, 48), torch.rand(7, 7))
    >>> [drawn.get_array().shape for drawn in figure.axes[0].images]
    [(32, 48, 3), (32, 48)]
    """
    picture, warmth = picture_of(image), _plane(heat)
    size = picture.shape[0], picture.shape[1]
    warmth = F.interpolate(warmth[None, None], size, mode="bilinear", align_corners=False)[0, 0]
    figure, ax = place(ax, *page(size, 4.5, beside=0.9))
    scale = _scale(warmth)
    strength = (warmth.abs() / scale.norm.vmax).nan_to_num(1.0)
    ax.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1)
    ax.imshow(warmth.numpy(), cmap=scale.cmap, norm=scale.norm, alpha=(0.1 + 0.6 * strength).numpy())
    ax.set_axis_off()
    colour_bar(ax, scale)
    return figure


def _of_one(given: Tensor, argument: str, needed: str, remedy: str) -> Tensor:
    """The first sample of four dimensions; three dimensions as they are."""
    if given.dim() not in (3, 4):
        raise ValueError(f"{argument} must be {needed}, not of shape {list(given.shape)}: {remedy}")
    if not given.numel():
        raise ValueError(f"{argument} is empty: its shape is {list(given.shape)}")
    return given[0] if given.dim() == 4 else given


def _scope(given: Tensor, drawn: int, what: str) -> str:
    """What part of the input is drawn, if not all of it."""
    samples, parts = len(given) if given.dim() == 4 else 1, given.shape[-3]
    parts_drawn = [f"{drawn} of {parts} {what}"] * (drawn < parts)
    return ", ".join([f"first of {samples} samples"] * (samples > 1) + parts_drawn)


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


def _scale(values: Tensor) -> Any:
    """One colour scale for all values: from zero up, or symmetric around zero."""
    signed, most = bool((values < 0).any()), share_below(values.abs(), 1.0) or 1.0
    return require("matplotlib.cm", "plot").ScalarMappable(
        norm=require("matplotlib.colors", "plot").Normalize(-most if signed else 0.0, most), cmap=colours(signed)
    )


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


def picture_of(image: Any) -> Tensor:
    """An image as height × width × channels in [0, 1], or height × width if it is grey."""
    found = _single(numbers(image, "image"), 3)
    if found.dim() == 3 and found.shape[0] in _CHANNELS:
        found = found.permute(1, 2, 0)
    if found.dim() not in (2, 3) or not found.numel() or (found.dim() == 3 and found.shape[2] not in _CHANNELS):
        needed = "[C, H, W] or [H, W, C] with 1, 3 or 4 channels, or [H, W]"
        raise ValueError(
            f"image must be {needed}, not of shape {list(found.shape)}: pass one image of a batch, such as image[0]"
        )
    low, high = share_below(found, 0.0), share_below(found, 1.0)
    if str(getattr(image, "dtype", "")).endswith("uint8"):
        found = found / 255
    elif low < 0 or high > 1:
        found = (found - low) / ((high - low) or 1.0)
    found = found.nan_to_num(0.0).clamp(0, 1)
    return found[..., 0] if found.dim() == 3 and found.shape[2] == 1 else found


def _plane(heat: Any) -> Tensor:
    found = finite(_single(numbers(heat, "heat"), 2))
    if found.dim() != 2 or not found.numel():
        raise ValueError(
            f"heat must be [h, w], not of shape {list(found.shape)}: pass one map of a batch, such as heat[0]"
        )
    return found


def _single(found: Tensor, dims: int) -> Tensor:
    """`found` without leading dimensions of size one."""
    while found.dim() > dims and found.shape[0] == 1:
        found = found[0]
    return found
