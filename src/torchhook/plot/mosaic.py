"""Many small images of one size in one large image, with a caption above each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchhook.core.optional import require
from torchhook.plot.style import SMALL, inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 1.5  # width of the whole, relative to its height
_LEAST = 3.5  # points: smaller captions are not drawn


class Mosaic(NamedTuple):
    """`tiles` (n × height × width) in a grid of `columns`, with room for captions and gaps.

    >>> mosaic = Mosaic.of(torch.zeros(6, 10, 10))
    >>> mosaic.columns, mosaic.rows, mosaic.shape
    (3, 2, (22, 33))
    """

    tiles: Tensor
    columns: int
    above: int  # pixels for the caption
    beside: int

    @classmethod
    def of(cls, tiles: Tensor, columns: int | None = None) -> Mosaic:
        """Arrange the tiles in this many columns, or so that they fit a page."""
        count, height, width = tiles.shape
        columns = columns or max(1, min(count, round(math.sqrt(_WIDE * count * height / width))))
        above, beside = round(0.14 * max(height, width / 4)), round(0.06 * max(width, height / 4))
        return cls(tiles, columns, max(1, above), max(1, beside))

    @property
    def rows(self) -> int:
        """The number of rows."""
        return math.ceil(len(self.tiles) / self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the whole, in pixels."""
        height, width = self.tiles.shape[1:]
        return self.rows * (height + self.above), self.columns * (width + self.beside)

    def corner(self, number: int) -> tuple[int, int]:
        """Row and column of the first pixel of a tile."""
        height, width = self.tiles.shape[1:]
        row, column = divmod(number, self.columns)
        return row * (height + self.above) + self.above, column * (width + self.beside)

    def draw(
        self, ax: Axes, colour: Callable[..., Any], captions: Sequence[str], flat: Mapping[int, str] | None = None
    ) -> None:
        """Draw each tile with its caption; `colour` maps values to colours, `flat` tiles have one of their own."""
        values, empty = torch.zeros(self.shape, dtype=torch.float64), torch.ones(self.shape, dtype=torch.bool)
        to_rgba = require("matplotlib.colors", "plot").to_rgba
        height, width = self.tiles.shape[1:]
        for number, tile in enumerate(self.tiles):
            top, left = self.corner(number)
            values[top : top + height, left : left + width] = tile
            empty[top : top + height, left : left + width] = False
        pixels = colour(values.numpy(), bytes=True)
        for number, own in (flat or {}).items():
            top, left = self.corner(number)
            tile = pixels[top : top + height, left : left + width]
            tile[self.tiles[number].isfinite().numpy()] = [round(255 * part) for part in to_rgba(own)]
        pixels[empty.numpy(), 3] = 0
        ax.imshow(pixels, interpolation="nearest")
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        self._caption(ax, captions)

    def pixel(self, ax: Axes) -> float:
        """The size of a pixel of the mosaic in `ax`, in inches."""
        wide, high = inches(ax)
        return min(wide / self.shape[1], high / self.shape[0])

    def _caption(self, ax: Axes, captions: Sequence[str]) -> None:
        pixel, width = self.pixel(ax), self.tiles.shape[2] + self.beside
        across = (
            72 * pixel * width / (0.6 * max(map(len, captions)))
        )  # the width of a letter is about 0.6 of its height
        size = min(SMALL, 72 * 0.85 * pixel * self.above, across)
        for number, caption in enumerate(captions if size >= _LEAST else ()):
            top, left = self.corner(number)
            ax.text(left - 0.5, top - 0.6, caption, fontsize=size, va="bottom")
