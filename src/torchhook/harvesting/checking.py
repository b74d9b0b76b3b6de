"""Whether files are as they were written: their rows, read and compared with the checksums in the journals."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TextIO

import torch

from torchhook.errors import HarvestError
from torchhook.harvesting.growing import as_bytes
from torchhook.harvesting.parts import Part
from torchhook.progress import shown

_PIECE = 8 * 2**20  # bytes at a time


def check(files: Sequence[tuple[Part, int]], progress: TextIO | None) -> int:
    """Read all rows of `files`, each with its checksum; how many bytes. A `HarvestError` names all broken ones."""
    pieces = sum(-(-part.rows // _rows(part)) for part, _ in files)
    found = dict(shown(_checksums(files), pieces, f"{_PIECE >> 20} MiB", progress))  # the last of a file is of all
    broken = [repr(str(part.path)) for part, crc32 in files if found.get(part, 0) != crc32]
    if broken:
        raise HarvestError(f"not as they were written, by their checksums: {', '.join(broken)}; harvest them anew")
    return sum(part.nbytes for part, _ in files)


def _checksums(files: Sequence[tuple[Part, int]]) -> Iterator[tuple[Part, int]]:
    """The checksum of each file up to there, after every piece."""
    for part, _ in files:
        crc32, step = 0, _rows(part)
        buffer = torch.empty(min(step, part.rows), *part.shape, dtype=part.dtype)
        for start in range(0, part.rows, step):
            rows = buffer[: part.rows - start]
            part.read(rows, start)
            crc32 = zlib.crc32(as_bytes(rows), crc32)
            yield part, crc32


def _rows(part: Part) -> int:
    return max(1, _PIECE // max(1, part.row_bytes))
