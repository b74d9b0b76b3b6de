"""Heat maps, alone or over their images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from torchhook.plot.arrays import ARRAY, finite, numbers, share_below
from torchhook.plot.style import SMALL, colour_bar, colour_scale, label, new_figure, page, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CHANNELS = (1, 3, 4)  # of an image
_ACROSS = 4  # maps in a row


class _Map(NamedTuple):
    """One heat map: what it explains, what its numbers are, and the size of the input that it belongs to."""

    values: Tensor
    target: object = None
    unit: str = "heat"
    size: tuple[int, int] | None = None


def cam(image: Any, heat: Any = None, *, ax: Axes | None = None) -> Figure:
    """A heat map over its image, the hotter the more opaque; ``cam(heat)`` draws the map alone.

    Args:
        image: ``[C, H, W]`` or ``[H, W, C]`` with 1, 3 or 4 channels, or ``[H, W]``; bytes, or floats in [0, 1].
            Floats outside that range, as in a normalised image, are rescaled to it. For several maps, a batch or a
            list with an image for each.
        heat: A result of `torchhook.explain`, such as ``grad_cam(model, x)``, with a map per sample; or ``[h, w]``
            of any size. It is resized to the image. Colours go from violet to yellow, or from blue to red if any value
            is negative.

    >>> import torch
    >>> figure = cam(torch.rand(3, 32, 48), torch.rand(7, 7))
    >>> [drawn.get_array().shape for drawn in figure.axes[0].images]
    [(32, 48, 3), (32, 48)]
    """
    if heat is None or _is_heat(image):
        image, heat = heat, image
    maps = _maps(heat)
    images = _images(image, len(maps)) if _is_heat(heat) and image is not None else [image] * len(maps)
    if len(maps) == 1:
        return _draw(images[0], maps[0], ax)
    if ax is not None:
        raise ValueError(f"ax has room for one map, and heat has {len(maps)}: pass one of them, such as heat[0]")
    rows = -(-len(maps) // _ACROSS)
    figure = new_figure(4.5 * min(_ACROSS, len(maps)) + 0.9, 4.0 * rows)
    places = [figure.add_subplot(rows, min(_ACROSS, len(maps)), number + 1) for number in range(len(maps))]
    for one, some, where in zip(images, maps, places, strict=True):
        _draw(one, some, where)
    return figure


def _is_heat(value: Any) -> bool:
    """Whether it is a result of `torchhook.explain`, as far as a plot needs it."""
    return all(hasattr(value, name) for name in ("maps", "target", "method", "layer", "size"))


def _maps(heat: Any) -> list[_Map]:
    if not _is_heat(heat):
        return [_Map(_plane(heat))]
    if not len(heat.maps):
        raise ValueError("heat has no maps: it was made of no samples")
    unit = f"{heat.method} of {heat.layer or 'the model'}"
    return [_Map(_plane(one), target, unit, heat.size) for one, target in zip(heat.maps, heat.target, strict=True)]


def _images(image: Any, count: int) -> Sequence[Any]:
    """One image per map."""
    is_one = count == 1 and not isinstance(image, (list, tuple)) and getattr(image, "ndim", 3) < 4
    images = [image] if is_one else list(image)
    if len(images) != count:
        raise ValueError(f"pass {count} images, one per sample, not {len(images)}; heat[0] is the first sample alone")
    return images


def _draw(image: Any, heat: _Map, ax: Axes | None) -> Figure:
    picture = None if image is None else picture_of(image)
    warmth = heat.values
    high, wide = heat.size or warmth.shape if picture is None else picture.shape[:2]
    figure, ax = place(ax, *page((high, wide), 4.5, beside=0.9))
    style: dict[str, Any] = {"extent": (-0.5, wide - 0.5, high - 0.5, -0.5), "interpolation": "nearest"}
    if picture is not None:
        warmth = F.interpolate(warmth[None, None], (high, wide), mode="bilinear", align_corners=False)[0, 0]
        ax.imshow(picture.numpy(), cmap="gray", vmin=0, vmax=1)
    scale = colour_scale(warmth)
    if picture is not None:
        style["alpha"] = (0.1 + 0.6 * (warmth.abs() / scale.norm.vmax).nan_to_num(1.0)).numpy()
    ax.imshow(warmth.numpy(), cmap=scale.cmap, norm=scale.norm, **style)
    ax.set_title("" if heat.target is None else label(heat.target), fontsize=SMALL)
    unit = "cells" if picture is None and heat.size is None else "pixels"
    ax.set_xlabel(f"x ({unit})", fontsize=SMALL)
    ax.set_ylabel(f"y ({unit})", fontsize=SMALL)
    ax.tick_params(labelsize=SMALL)
    colour_bar(ax, scale, heat.unit)
    return figure


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
    found = finite(_single(numbers(heat, "heat", f"{ARRAY}, or a result of torchhook.explain such as grad_cam"), 2))
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
