"""States as bytes, without pickle: the first bytes of all states, then the second bytes, and so on, deflated.

This puts together what is alike in many places (counts, exponents, empty bins): moments shrink to two fifths of their
size, histograms to a hundredth. They read back bit for bit.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST = 1 << 30  # bytes: a blob that claims to hold more is corrupt


def packed(states: Tensor) -> bytes:
    """States of the same shape, stacked along the first dimension, as a blob.

    >>> states = torch.tensor([[1.0, float("nan")], [2.0, -0.0]])
    >>> unpacked([packed(states)], 2, (2,)).tolist()
    [[[1.0, nan], [2.0, -0.0]]]
    """
    if not states.numel():
        return zlib.compress(b"")
    planes = states.double().reshape(-1).view(torch.uint8).view(len(states), -1).T.contiguous()
    return zlib.compress(ctypes.string_at(planes.data_ptr(), planes.nbytes), 1)


def unpacked(blobs: Sequence[bytes], places: int, shape: Sequence[int]) -> Tensor:
    """The states in blobs made by `packed`, each of `places` places: a tensor of blobs × places × shape."""
    numbers = math.prod(shape)
    size = 8 * numbers * places
    if min((size, *shape)) < 0 or size > _MOST:
        raise ValueError(f"corrupt layout: it claims {size:,} bytes of states per step")
    if not size:
        return torch.zeros(len(blobs), places, *shape, dtype=torch.float64)
    whole = bytearray().join(_inflated(blob, size) for blob in blobs)
    planes = torch.frombuffer(whole, dtype=torch.uint8).view(len(blobs), 8 * numbers, places)
    return planes.transpose(1, 2).reshape(-1).view(torch.float64).view(len(blobs), places, *shape)


def _inflated(blob: bytes, size: int) -> bytes:
    """The content of a blob, which has to be `size` bytes; no more than that is ever inflated."""
    try:
        found = zlib.decompressobj().decompress(blob, size + 1)
    except zlib.error as error:
        raise ValueError(f"corrupt blob: {error}") from error
    if len(found) != size:
        found_bytes = f"{len(found):,}" if len(found) < size else "more"
        raise ValueError(f"corrupt blob: expected {size:,} bytes, got {found_bytes}")
    return found
