"""How strongly each level of a feature pyramid responds to whole images and to the objects in boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import on_device
from torchhook.core.errors import SelectionError
from torchhook.core.event import Event
from torchhook.core.model_state import evaluating
from torchhook.core.renamed import renamed
from torchhook.core.result import Result
from torchhook.core.selection import Query, Selector, Sites, queries_of, require_module, select
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.torch_internals import submodules
from torchhook.explain.untrained import warn_of_untrained

_SIZES = ("small", "medium", "large")
_AREAS = (32**2, 96**2)  # pixels of the original image, as COCO counts: where medium and large objects begin
_WEAK = 0.1  # of the median strength of the other levels
_STANDS_OUT = 0.2  # standard deviations of the background: less may be chance


class Level(NamedTuple):
    """The response of one level of a pyramid; None where there was nothing to measure."""

    name: str
    size: tuple[int, int]
    stride: tuple[float, float]  # pixels of the network's input per cell, vertically and horizontally
    strength: float  # mean absolute value
    rms: float
    dead: float | None  # fraction of channels that are constant
    background: float | None  # strength outside all boxes
    spread: float | None  # standard deviation of the background from cell to cell
    small: float | None  # mean strength inside the boxes of small objects
    medium: float | None
    large: float | None

    def contrast(self, size: str) -> float | None:
        """How far ``"small"``, ``"medium"`` or ``"large"`` objects stand out, in standard deviations of the background.

        Unlike the strength, this can be compared between levels of different scale.
        """
        inside = getattr(self, size)
        if inside is None or self.background is None or self.spread is None:
            return None
        above = float(inside) - self.background
        return above / self.spread if self.spread else math.copysign(math.inf, above) if above else 0.0


class Pyramid(Result, Sequence[Level]):
    """The levels of a pyramid in the order of the model, and which of them are weak."""

    def __init__(self, layer: str, levels: list[Level], images: int, objects: dict[str, int]) -> None:
        self.layer = layer
        self.levels = levels
        self.images = images
        self.objects = objects  # how many of each size; empty without boxes

    @property
    def weak(self) -> list[Level]:
        """The levels with less than a tenth of the median strength of the others."""
        return [level for level in self.levels if not self._share(level) >= _WEAK]

    @property
    def verdict(self) -> str:
        """Which levels are weak, and at which level the objects of each size stand out most, in a few sentences."""
        weak = [f"{level.name!r} has {self._share(level):.2g} of the others' strength" for level in self.weak]
        first = f"Weak levels: {'; '.join(weak)}." if weak else "No level is weak."
        return " ".join([first, *(self._best(size) for size in _SIZES if self.objects.get(size))])

    def __getitem__(self, index: Any) -> Any:
        return self.levels[index]

    def __len__(self) -> int:
        return len(self.levels)

    def _records(self) -> list[dict[str, Any]]:
        return [level._asdict() for level in self.levels]

    def _foot(self) -> Sequence[str]:
        return (self.verdict,)

    def _share(self, level: Level) -> float:
        """The strength of a level over the median of the others."""
        others = [other.strength for other in self.levels if other is not level and math.isfinite(other.strength)]
        usual = median(others) if others else 0.0
        return level.strength / usual if usual else math.nan if math.isnan(level.strength) else math.inf

    def _best(self, size: str) -> str:
        found = {level: contrast for level in self.levels if (contrast := level.contrast(size)) is not None}
        found = {level: contrast for level, contrast in found.items() if not math.isnan(contrast)}
        count = f"{self.objects[size]} {size} object{'s' * (self.objects[size] > 1)}"
        if not found:
            return f"{count}: there is no background to compare with."
        level = max(found, key=lambda one: (found[one], getattr(one, size)))
        if not found[level] >= _STANDS_OUT:
            return f"{count}: nowhere clearly above background (highest at {level.name!r}, {_sigmas(found[level])})."
        return f"{count}: clearest at {level.name!r}, {_sigmas(found[level])} above background."

    def _title(self) -> str:
        of = f"{self.layer!r}" if self.layer else "the model"
        return f"Pyramid of {of}: {len(self)} levels, {self.images} image{'s' * (self.images > 1)}"

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        inside = ("background", *_SIZES) if self.objects else ()
        header, rows = ("level", "cells", "stride", "mean |x|", "rms", "dead", *inside), []
        for level in self.levels:
            stride = "×".join(f"{one:.4g}" for one in dict.fromkeys(level.stride))
            row = [level.name, "×".join(map(str, level.size)), stride, f"{level.strength:.3g}", f"{level.rms:.3g}"]
            row.append("–" if level.dead is None else f"{level.dead:.0%}")
            if self.objects:
                row.append("–" if level.background is None else f"{level.background:.3g}")
                row += [_strength_text(getattr(level, size), level.contrast(size)) for size in _SIZES]
            rows.append(row)
        return header, rows


@renamed(layer="sites")
def pyramid(detector: nn.Module, images: Any, boxes: Any = None, *, sites: Sites = None) -> Pyramid:
    """How strongly each level of `detector`'s feature pyramid responds to `images`, and to the objects in `boxes`.

    If the module that returns the pyramid is known, the forward ends after it: `sites`, or the ``backbone`` of
    torchvision's detectors (RetinaNet, FCOS, Faster R-CNN). The padding that those add is left out. The model runs in
    eval mode without gradients, and its modes are restored afterwards.

    Args:
        images: Images ``[C, H, W]`` in a list, or in one batch.
        boxes: For each image a tensor ``[k, 4]`` of x0, y0, x1, y1 in pixels of that image, which may be empty. With
            boxes, the response is also measured inside small (area below 32²), medium and large objects (from 96²),
            and outside all boxes; in brackets is how far it exceeds the background, in standard deviations (σ) of the
            background from cell to cell. A cell that a box covers in part counts in part. If a detector resizes the
            images, the boxes are resized too.
        sites: The module whose output is the pyramid: a dict or list of maps N×C×h×w. None takes the last one in
            execution order that returns maps of more than one size.

    >>> class Levels(nn.Module):
    ...     def forward(self, x):
    ...         return {"fine": x, "coarse": 0.01 * nn.functional.avg_pool2d(x, 2)}
    >>> image = torch.zeros(1, 1, 64, 64)
    >>> image[..., 8:24, 8:24] = 1.0
    >>> pyramid(Levels(), image, [torch.tensor([[8.0, 8.0, 24.0, 24.0]])])
    Pyramid of the model: 2 levels, 1 image
    level   cells  stride  mean |x|  rms     dead  background  small       medium  large
    fine    64×64  1       0.0625    0.25    0%    0           1 (∞ σ)     –       –
    coarse  32×32  2       0.000625  0.0025  0%    0           0.01 (∞ σ)  –       –
    Weak levels: 'coarse' has 0.01 of the others' strength. 1 small object: clearest at 'fine', ∞ σ above background.
    """
    require_module(detector, "detector")
    pictures = _pictures(images)
    placed = _boxes(boxes, pictures)
    warn_of_untrained(detector)
    with torch.no_grad(), evaluating(detector):
        found = _run(detector, on_device(pictures, detector), sites)
    frames = [_Frame(tuple(one.shape[-2:]), size, found.size) for one, size in zip(pictures, found.sizes, strict=True)]
    objects = _counts(placed) if placed is not None else {}
    return Pyramid(
        found.path, [_level(name, maps, frames, placed) for name, maps in found.maps.items()], len(frames), objects
    )


class _Frame(NamedTuple):
    """The height and width of an image: as given, after resizing, and of the batch that it is padded to."""

    own: tuple[int, ...]
    resized: tuple[int, int]
    padded: tuple[int, int]


class _FoundPyramid:
    """The last pyramid found in one pass, and the size of the images in the batch."""

    def __init__(self, pictures: list[Tensor], wanted: bool) -> None:
        self.wanted = wanted  # the layer was named, so its output must be a pyramid
        self.path = ""
        self.maps: dict[str, Tensor] = {}
        self.sizes = [(int(one.shape[-2]), int(one.shape[-1])) for one in pictures]
        self.size = self.sizes[0]

    def look(self, event: Event) -> None:
        """Keep the output of a module if it is a pyramid."""
        maps = _maps(event.value)
        several = len({one.shape[-2:] for one in maps.values()}) > 1
        if maps and len(next(iter(maps.values()))) == len(self.sizes) and (several or self.wanted):
            self.path, self.maps = event.path, maps
        elif self.wanted:
            raise ValueError(
                f"layer {event.path!r} returned {shape_of(event.value):.200}, which is not a pyramid of these"
                f" {len(self.sizes)} images; name a module that returns a dict or list of maps N×C×h×w"
            )

    def measure(self, event: Event) -> None:
        """Note the sizes of the images after the transform of a torchvision detector."""
        batch = event.live[0]  # an ImageList
        self.sizes = [(int(height), int(width)) for height, width in batch.image_sizes]
        self.size = (int(batch.tensors.shape[-2]), int(batch.tensors.shape[-1]))


def _run(detector: nn.Module, pictures: list[Tensor], layer: Sites) -> _FoundPyramid:
    """Run the detector as far as needed."""
    transform = next((path for path, module in select(detector, "", *_all(detector)).items() if _resizes(module)), None)
    if layer is None and transform is not None:
        layer = "backbone"
    found = _FoundPyramid(pictures, layer is not None)
    taps = [Tap(query, found.look) for query in (queries_of(layer) or ["", *_all(detector)])]
    if transform is not None:
        taps.insert(0, Tap(transform, found.measure))
    given: Any = pictures if transform is not None else _stacked(pictures)
    stop, on_silent = layer is not None, None if layer is not None else "ignore"
    with Session(detector, taps, stop=stop, on_silent=on_silent):  # type: ignore[arg-type]  # a literal
        detector(given)
    if not found.maps:
        raise SelectionError(
            f"no module of this {type(detector).__name__} returned a dict or list of maps N×C×h×w of several sizes;"
            " name the one that returns the pyramid with sites="
        )
    return found


def _all(model: nn.Module) -> list[Query]:
    """A query for every module inside the model; empty if there are none."""
    return [Selector(lambda path, module, mark: True, "every module")] if submodules(model) else []


def _resizes(module: nn.Module) -> bool:
    """Whether it is the transform of a torchvision detector, recognised by name so as not to need torchvision."""
    return any(kind.__name__ == "GeneralizedRCNNTransform" for kind in type(module).__mro__)


def _maps(value: Any) -> dict[str, Tensor]:
    """The maps of a pyramid by name; empty if `value` is not a pyramid."""
    items = _named(value)
    while len(items) == 1:  # {"feature_maps": (…)}
        items = _named(items[0][1])
    maps = {str(name): one for name, one in items if isinstance(one, Tensor) and one.dim() == 4}
    fits = len(maps) == len(items) and len(maps) > 1 and all(one.is_floating_point() for one in maps.values())
    return maps if fits else {}


def _named(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (tuple, list)) else []


def _pictures(images: Any) -> list[Tensor]:
    pictures = list(images) if isinstance(images, (Tensor, Sequence)) else []
    if not pictures or not all(isinstance(one, Tensor) and one.dim() == 3 for one in pictures):
        raise ValueError(
            f"images must be a list of tensors [C, H, W] or a batch [N, C, H, W], not {shape_of(images):.200}:"
            " pass a single image as images[None]"
        )
    return pictures


def _stacked(pictures: list[Tensor]) -> Tensor:
    if len({one.shape for one in pictures}) > 1:
        raise ValueError(
            f"images have several sizes ({shape_of(pictures):.200}), but unlike torchvision's detectors this model does"
            " not resize them; pass images of one size"
        )
    return torch.stack(pictures)


def _boxes(boxes: Any, pictures: list[Tensor]) -> list[Tensor] | None:
    if boxes is None:
        return None
    if not isinstance(boxes, Iterable) or len(placed := list(boxes)) != len(pictures):
        raise ValueError(f"boxes must be one tensor [k, 4] for each of the {len(pictures)} images")
    pairs = zip(placed, pictures, strict=True)
    return [_of_image(torch.as_tensor(some), picture, number) for number, (some, picture) in enumerate(pairs)]


def _of_image(boxes: Tensor, picture: Tensor, number: int) -> Tensor:
    """The boxes of one image, clipped to it."""
    boxes = boxes.detach().cpu().double().reshape(-1, 4) if not boxes.numel() else boxes.detach().cpu().double()
    if boxes.dim() != 2 or boxes.shape[1] != 4:
        raise ValueError(f"boxes of image {number} must have shape [k, 4], not {list(boxes.shape)}")
    height, width = picture.shape[-2:]
    most = torch.tensor([width, height, width, height], dtype=torch.float64)
    clipped = boxes.clamp(min=0).minimum(most)
    wrong = ((clipped[:, 2:] <= clipped[:, :2]).any(1) | ~boxes.isfinite().all(1)).nonzero()
    if len(wrong):
        raise ValueError(
            f"box {boxes[wrong[0, 0]].tolist()} has no area inside image {number}, which is {width}×{height} pixels;"
            " boxes are x0, y0, x1, y1 in pixels of the image as given"
        )
    return clipped


def _counts(boxes: list[Tensor]) -> dict[str, int]:
    sizes = [size for some in boxes for size in map(_size_of, some)]
    return {size: sizes.count(size) for size in _SIZES}


def _size_of(box: Tensor) -> str:
    area = float((box[2] - box[0]) * (box[3] - box[1]))
    return _SIZES[sum(area >= least for least in _AREAS)]


def _level(name: str, maps: Tensor, frames: list[_Frame], boxes: list[Tensor] | None) -> Level:
    """The response of one level to all images."""
    maps = maps.float()
    size = (int(maps.shape[-2]), int(maps.shape[-1]))
    stride = (_stride(frames[0].padded[0], size[0]), _stride(frames[0].padded[1], size[1]))
    energy, square = maps.abs().mean(1), maps.square().mean(1)
    real = torch.stack([_cover((0, 0, f.resized[1], f.resized[0]), size, stride) for f in frames]).to(maps)
    inside: dict[str, list[float]] = {kind: [] for kind in _SIZES}
    outside = real.clone()
    for number, frame in enumerate(frames):
        scale = [new / old for new, old in zip(frame.resized, frame.own, strict=True)]
        for box in boxes[number] if boxes is not None else ():
            moved = (box * torch.tensor([scale[1], scale[0], scale[1], scale[0]])).tolist()
            cover = _cover(moved, size, stride).to(maps)
            inside[_size_of(box)].append(_mean(energy[number], cover))
            outside[number] = outside[number].minimum((real[number] - cover).clamp(min=0))
    means = [fmean(some) if some else None for some in inside.values()]
    background = spread = None
    if boxes is not None and bool(outside.any()):
        background = _mean(energy, outside)
        spread = math.sqrt(_mean((energy - background).square(), outside))
    strength, rms = _mean(energy, real), math.sqrt(_mean(square, real))
    return Level(name, size, stride, strength, rms, _dead(maps, real > 0), background, spread, *means)


def _stride(pixels: int, cells: int) -> float:
    """Pixels per cell: convolutions round up, so the last cell may be partly outside the image.

    >>> _stride(800, 100), _stride(800, 13), _stride(90, 30)
    (8.0, 64.0, 3.0)
    """
    halved = 2.0 ** round(math.log2(pixels / cells))
    return halved if math.ceil(pixels / halved) == cells else pixels / cells


def _cover(box: Sequence[float], size: tuple[int, int], stride: tuple[float, float]) -> Tensor:
    """The fraction of each cell that `box` covers."""
    down, across = (
        ((high / step - cells).clamp(0, 1) - (low / step - cells).clamp(0, 1))
        for low, high, step, cells in (
            (box[1], box[3], stride[0], torch.arange(size[0], dtype=torch.float64)),
            (box[0], box[2], stride[1], torch.arange(size[1], dtype=torch.float64)),
        )
    )
    return down[:, None] * across


def _mean(values: Tensor, weights: Tensor) -> float:
    return float((values * weights).sum() / weights.sum())


def _dead(maps: Tensor, real: Tensor) -> float | None:
    """The fraction of channels that are constant over the images; None if these cover a single cell."""
    if int(real.sum()) < 2:
        return None
    values = maps.movedim(1, -1)[real]
    return float((values.amax(0) == values.amin(0)).double().mean())


def _strength_text(inside: float | None, contrast: float | None) -> str:
    if inside is None or contrast is None:
        return "–" if inside is None else f"{inside:.3g}"
    return f"{inside:.3g} ({_sigmas(contrast)})"


def _sigmas(contrast: float) -> str:
    return f"{contrast:.1f} σ".replace("inf", "∞")
