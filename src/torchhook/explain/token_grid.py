"""Fold the output of a layer into maps, samples × channels × height × width: tokens return to the grid of patches.

The shape alone does not say which patch a token belongs to. The grid is that of the convolution that cut the image into
patches in the same pass, if the number of tokens fits it, allowing for the usual tokens before the patches (class,
distillation and register tokens). Otherwise it is the only grid of that many patches with the proportions of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from torchhook.core.text import shape_of

Fold = Callable[[Tensor], Tensor]
"""From the value of a layer, or its gradient, to maps: it may only rearrange the numbers."""

Grid = tuple[int, int]

_COMMON = (1, 2, 5)  # usual numbers of tokens before the patches: class; and distillation; class and four registers
_RARE = (3, 4, 8, 9, 16, 17)  # other numbers of registers, with and without a class token
_PREFIXES = (*_COMMON, *_RARE)
_LAST = (nn.LayerNorm, nn.Linear)  # these classes, but not their subclasses, always have the channels last


class ImageLayout(NamedTuple):
    """What is known of the images in a pass: how many, their size, and the grids of patches they were cut into."""

    samples: int | None
    size: Grid | None
    grids: tuple[Grid, ...] = ()


def fold_for(value: Tensor, module: nn.Module, layout: ImageLayout) -> Fold | None:
    """How to fold `value`, the output of `module`, into maps; None if it has no spatial extent.

    >>> import torch
    >>> tokens = torch.arange(5.0).view(1, 5, 1).expand(1, 5, 8)
    >>> fold = fold_for(tokens, nn.Identity(), ImageLayout(1, (32, 32)))
    >>> fold(tokens)[0, 0]
    tensor([[1., 2.],
            [3., 4.]])
    """
    if not value.is_floating_point() or layout.samples not in (None, value.shape[0] if value.dim() else None):
        return None
    if value.dim() == 4:
        return _fold_of_maps(value, module, layout.size)
    if value.dim() == 3 and value.shape[2] > 1:  # a value that was averaged over its tokens has one number per channel
        return _fold_of_tokens(value.shape[1], layout)
    return None


def checked_fold(fold: Fold, samples: int | None) -> Fold:
    """A user's `fold`, with a check that it returns maps."""

    def fold_and_check(value: Tensor) -> Tensor:
        maps = fold(value)
        if isinstance(maps, Tensor) and maps.dim() == 4 and samples in (None, len(maps)):
            return maps
        many = "samples" if samples is None else f"{samples} samples"
        raise ValueError(
            f"fold must return {many} × channels × height × width, but turned {shape_of(value)} into {shape_of(maps)}"
        )

    return fold_and_check


def is_like(grid: Grid, size: Grid) -> bool:
    """Whether a grid has the proportions of an image, to within less than one cell.

    >>> is_like((7, 11), (224, 340)), is_like((7, 13), (224, 340))
    (True, False)
    """
    return abs(grid[0] * size[1] - grid[1] * size[0]) < max(size)


def _fold_of_maps(value: Tensor, module: nn.Module, size: Grid | None) -> Fold | None:
    first, last = (value.shape[2], value.shape[3]), (value.shape[1], value.shape[2])
    like_last = size is not None and is_like(last, size) and not is_like(first, size)
    if like_last or type(module) in _LAST:
        return _channels_first if last[0] * last[1] > 1 else None
    return _unchanged if first[0] * first[1] > 1 else None


def _fold_of_tokens(tokens: int, layout: ImageLayout) -> Fold | None:
    grid = next(_grids(tokens, layout), None)
    return None if grid is None or grid[0] * grid[1] < 2 else _TokenFold(grid)


def _grids(tokens: int, layout: ImageLayout) -> Iterator[Grid]:
    """The grids that this number of tokens may form, the likeliest first."""
    seen = [(tokens - grid[0] * grid[1], grid) for grid in reversed(layout.grids)]
    yield from (grid for more, grid in seen if not more)
    # A grid of a single row or column rather holds the reduced keys of an attention than the patches of the image.
    yield from (grid for more, grid in seen if more in _PREFIXES and min(grid) > 1)
    yield from _image_like_grids(tokens, layout.size)
    yield from (grid for more, grid in seen if more in _PREFIXES)
    if all(more < 0 for more, _ in seen):  # more tokens than patches, by an unusual number, may come after them
        for prefix in _COMMON:
            yield from _image_like_grids(tokens - prefix, layout.size)
        rare = [grid for prefix in _RARE for grid in _image_like_grids(tokens - prefix, layout.size)]
        yield from rare if len(rare) == 1 else ()


def _image_like_grids(patches: int, size: Grid | None) -> Iterator[Grid]:
    """The grids of this many patches that have the proportions of the image."""
    if size is None or patches < 1:
        return
    about = int((patches * size[0] / size[1]) ** 0.5)
    for high in range(max(1, about - 1), about + 3):
        wide, rest = divmod(patches, high)
        if not rest and is_like((high, wide), size):
            yield high, wide


def _unchanged(value: Tensor) -> Tensor:
    return value


def _channels_first(value: Tensor) -> Tensor:
    return value.permute(0, 3, 1, 2)


class _TokenFold:
    """Arranges tokens in a grid, without those before the patches."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, tokens: Tensor) -> Tensor:
        high, wide = self.grid
        patches = tokens[:, tokens.shape[1] - high * wide :]
        return patches.mT.reshape(len(tokens), -1, high, wide)
