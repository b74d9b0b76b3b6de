"""Whether files are as they were written: their rows by the checksums in the journals, their headers word for word."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TextIO

import torch

from torchhook.activations.mapped import Part
from torchhook.captures.appendable import PAGE, as_bytes, header
from torchhook.core.errors import HarvestError
from torchhook.core.progress import track

_PIECE = 8 * 2**20  # bytes at a time
_UNREADABLE = -1  # which no checksum is


def check(files: Sequence[Part], progress: TextIO | None) -> int:
    """Read all rows of `files`; how many bytes. A `HarvestError` names all that are broken."""
    pieces = sum(-(-part.rows // _rows(part)) for part in files)
    found = dict(track(_checksums(files), pieces, f"{_PIECE >> 20} MiB", progress))  # the last of a file is of all
    broken = [part for part in files if found.get(part, 0) != part.crc32 or not _begins_right(part)]
    if broken:
        names = ", ".join(repr(str(part.path)) for part in broken)
        raise HarvestError(
            f"not as they were written: {names}; delete these files and call harvest again, which makes their shards"
            " anew"
        )
    return sum(part.nbytes for part in files)


def _checksums(files: Sequence[Part]) -> Iterator[tuple[Part, int]]:
    """The checksum of each file up to there, after every piece."""
    for part in files:
        crc32, step = 0, _rows(part)
        buffer = torch.empty(min(step, part.rows), *part.shape, dtype=part.dtype)
        for start in range(0, part.rows, step):
            rows = buffer[: part.rows - start]
            try:
                part.read(rows, start)
            except (OSError, HarvestError):
                yield part, _UNREADABLE
                break
            crc32 = zlib.crc32(as_bytes(rows), crc32)
            yield part, crc32


def _begins_right(part: Part) -> bool:
    """Whether the header is that of these rows; while a file grows it may be ahead of the journal, or torn."""
    if not part.done:
        return True
    try:
        with part.path.open("rb") as file:
            return file.read(PAGE) == header(part.name, part.dtype, (part.rows, *part.shape))
    except OSError:
        return False


def _rows(part: Part) -> int:
    return max(1, _PIECE // max(1, part.row_bytes))
