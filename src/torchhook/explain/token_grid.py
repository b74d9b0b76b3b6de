"""From what a layer gave to maps, samples × channels × height × width: tokens are laid out as the patches they are of.

Which patch a token is of, its shape alone does not say. The grid is that of the convolution that cut the image into
patches in the same pass, if there are as many tokens, or as many more as usually come first and are of no patch (class,
distillation and register tokens). Else it is the one grid of so many patches that has the proportions of the image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from torchhook.core.text import shape_of

Fold = Callable[[Tensor], Tensor]
"""From the value of a layer, or its gradient, to maps: it may only put in order what is there."""

Grid = tuple[int, int]

_COMMON = (1, 2, 5)  # tokens of no patch that models have: class, distillation, class and four registers
_RARE = (3, 4, 8, 9, 16, 17)  # other numbers of registers, with and without a class token
_PREFIXES = (*_COMMON, *_RARE)
_LAST = (nn.LayerNorm, nn.Linear)  # themselves, not their subclasses, have the channels last, whatever the shape


class Setting(NamedTuple):
    """What is known of a pass: how many samples, the size of the images, the grids into which they were cut."""

    samples: int | None
    size: Grid | None
    grids: tuple[Grid, ...] = ()


def folding(value: Tensor, module: nn.Module, setting: Setting) -> Fold | None:
    """How to make maps of `value`, which `module` gave; None if it has no spatial extent.

    >>> import torch
    >>> tokens = torch.arange(5.0).view(1, 5, 1).expand(1, 5, 8)
    >>> fold = folding(tokens, nn.Identity(), Setting(1, (32, 32)))
    >>> fold(tokens)[0, 0]
    tensor([[1., 2.],
            [3., 4.]])
    """
    if not value.is_floating_point() or setting.samples not in (None, value.shape[0] if value.dim() else None):
        return None
    if value.dim() == 4:
        return _of_maps(value, module, setting.size)
    if value.dim() == 3 and value.shape[2] > 1:  # what was averaged over its tokens has one number a channel
        return _of_tokens(value.shape[1], setting)
    return None


def checked(fold: Fold, samples: int | None) -> Fold:
    """A user's `fold`, which must give maps."""

    def fold_and_check(value: Tensor) -> Tensor:
        maps = fold(value)
        if isinstance(maps, Tensor) and maps.dim() == 4 and samples in (None, len(maps)):
            return maps
        many = "samples" if samples is None else f"{samples} samples"
        said = f"fold must return {many} × channels × height × width, and of {shape_of(value)} it made {shape_of(maps)}"
        raise ValueError(said)

    return fold_and_check


def is_like(grid: Grid, size: Grid) -> bool:
    """Whether a grid has the proportions of an image, but for less than one cell.

    >>> is_like((7, 11), (224, 340)), is_like((7, 13), (224, 340))
    (True, False)
    """
    return abs(grid[0] * size[1] - grid[1] * size[0]) < max(size)


def _of_maps(value: Tensor, module: nn.Module, size: Grid | None) -> Fold | None:
    first, last = (value.shape[2], value.shape[3]), (value.shape[1], value.shape[2])
    like_last = size is not None and is_like(last, size) and not is_like(first, size)
    if like_last or type(module) in _LAST:
        return _channels_first if last[0] * last[1] > 1 else None
    return _as_it_is if first[0] * first[1] > 1 else None


def _of_tokens(tokens: int, setting: Setting) -> Fold | None:
    grid = next(_grids(tokens, setting), None)
    return None if grid is None or grid[0] * grid[1] < 2 else _Laying(grid)


def _grids(tokens: int, setting: Setting) -> Iterator[Grid]:
    """The grids that so many tokens may lie on, the likeliest first."""
    seen = [(tokens - grid[0] * grid[1], grid) for grid in reversed(setting.grids)]
    yield from (grid for more, grid in seen if not more)
    # A single row, or less, is rather what the keys of an attention were reduced to than what the image was cut into.
    yield from (grid for more, grid in seen if more in _PREFIXES and min(grid) > 1)
    yield from _like_the_image(tokens, setting.size)
    yield from (grid for more, grid in seen if more in _PREFIXES)
    if all(more < 0 for more, _ in seen):  # more than were cut, and not as usual, may lie after the patches
        for prefix in _COMMON:
            yield from _like_the_image(tokens - prefix, setting.size)
        rare = [grid for prefix in _RARE for grid in _like_the_image(tokens - prefix, setting.size)]
        yield from rare if len(rare) == 1 else ()


def _like_the_image(patches: int, size: Grid | None) -> Iterator[Grid]:
    """The grids of so many patches that have the proportions of the image."""
    if size is None or patches < 1:
        return
    about = int((patches * size[0] / size[1]) ** 0.5)
    for high in range(max(1, about - 1), about + 3):
        wide, rest = divmod(patches, high)
        if not rest and is_like((high, wide), size):
            yield high, wide


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _channels_first(value: Tensor) -> Tensor:
    return value.permute(0, 3, 1, 2)


class _Laying:
    """Lays tokens on a grid, without those before them."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid

    def __call__(self, tokens: Tensor) -> Tensor:
        high, wide = self.grid
        patches = tokens[:, tokens.shape[1] - high * wide :]
        return patches.mT.reshape(len(tokens), -1, high, wide)
