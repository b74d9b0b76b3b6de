"""Feature maps as an 8-bit greyscale picture, and as a PNG file."""

from __future__ import annotations

import ctypes
import math
import struct
import zlib

import torch
from torch import Tensor

_MOST = 64  # maps in a picture
_SIDE = 128  # pixels of each map
_GREY, _NUMBERED = 0, 3  # what the pixels of a PNG file are: shades of grey, or numbers of colours


def picture(maps: Tensor) -> Tensor:
    """Maps (n × height × width) side by side, one pixel apart.

    Each goes from black, its smallest value, to white, its largest; values that are not finite are black. Large maps
    are subsampled, and of many maps only the first are shown.

    >>> picture(torch.tensor([[[0.0, 1.0]], [[2.0, 6.0]]])).tolist()
    [[0, 255, 0, 0, 255]]
    """
    return _grid(_grey(maps[:_MOST]))


def views(maps: Tensor) -> dict[str, Tensor]:
    """Two pictures of the channels of a layer (n × height × width): of all of them, and of their mean.

    >>> {name: grey.tolist() for name, grey in views(torch.tensor([[[0.0, 1.0]], [[8.0, 2.0]]])).items()}
    {'maps': [[0, 255, 0, 255, 0]], 'mean_map': [[255, 0]]}
    """
    return {"maps": picture(maps), "mean_map": picture(maps.double().mean(0, keepdim=True))}


def png(maps: Tensor, odd: str | None = None) -> bytes:
    """The picture of some maps as the bytes of a PNG file; what is not finite is in the colour `odd`, if there is one.

    >>> png(torch.rand(5, 4, 3))[:4]
    b'\\x89PNG'
    """
    grid, kind, palette = picture(maps), _GREY, b""
    is_odd = _grid((~_smaller(maps[:_MOST]).isfinite()).to(torch.uint8)) > 0
    if odd is not None and is_odd.any():
        grid, kind = grid.clamp(min=1).masked_fill(is_odd, 0), _NUMBERED  # black is the second colour
        palette = bytes.fromhex(odd[1:]) + bytes(grey for grey in [0, *range(2, 256)] for _ in range(3))
    height, width = grid.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), grid], 1).contiguous()  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    pixels = zlib.compress(ctypes.string_at(rows.data_ptr(), rows.nbytes))
    chunks = {b"IHDR": header, **({b"PLTE": palette} if palette else {}), b"IDAT": pixels, b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks.items())


def _grey(maps: Tensor) -> Tensor:
    maps = _smaller(maps).double()
    finite = maps.isfinite()
    low = maps.where(finite, math.inf).amin((1, 2), keepdim=True)
    high = maps.where(finite, -math.inf).amax((1, 2), keepdim=True)
    scaled = torch.where(high > low, (maps - low) / (high - low), 0.5)
    return (scaled.where(finite, 0) * 255).round().to(torch.uint8)


def _smaller(maps: Tensor) -> Tensor:
    stride = max(1, math.ceil(max(maps.shape[1:]) / _SIDE))
    return maps[:, ::stride, ::stride]


def _grid(pictures: Tensor) -> Tensor:
    """Pictures in a grid with about as many rows as columns."""
    columns = math.ceil(math.sqrt(len(pictures)))
    rows = math.ceil(len(pictures) / columns)
    height, width = pictures.shape[1] + 1, pictures.shape[2] + 1
    grid = torch.zeros(rows * columns, height, width, dtype=torch.uint8)
    grid[: len(pictures), :-1, :-1] = pictures
    return grid.view(rows, columns, height, width).transpose(1, 2).reshape(rows * height, columns * width)[:-1, :-1]


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
