"""Reads rows from the files of a store: those that are committed, by memory map or into a buffer.

Maps are private: writing to a mapped tensor changes neither the file nor any other tensor.
"""

from __future__ import annotations

import ctypes
import math
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchhook.captures.appendable import PAGE, as_bytes, header, row_bytes
from torchhook.core.errors import HarvestError
from torchhook.core.progress import Progress, track

_SMALL = 64 * 1024  # bytes: below this, reading is faster than mapping, and a process may have only 65530 maps
_RANDOM = 1  # MADV_RANDOM on every system
_THREADS = 8  # each may wait for the disk, which serves several requests at a time
_PIECE = 1 << 15  # values: for more, torch would start threads of its own in each of ours
_SLOW = 1e-3  # seconds: copying a piece that is in memory takes a tenth of it
_READAHEAD = 128 * 1024  # bytes: of more at a time, Linux may read only these
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHECK_BYTES = 8 * 2**20  # bytes per piece of a checksum
_UNREADABLE = -1  # never a checksum


@dataclass(frozen=True)
class RowFile:
    """The committed rows of one file, as its journal describes them.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import tempfile
    >>> from torchhook.captures.appendable import AppendableTensor
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
    ...     path = Path(folder) / "x.safetensors"
    ...     file = AppendableTensor(path, "values", torch.float32, (2,), pool)
    ...     file.append(torch.arange(6.0).view(3, 2)), file.close()
    ...     RowFile(path, "values", torch.float32, (2,), 2).span(1, 2)
    (None, None)
    tensor([[2., 3.]])
    """

    path: Path
    name: str  # of the tensor in the file
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one row
    rows: int
    crc32: int = 0
    done: bool = False  # whether the file is complete

    def __post_init__(self) -> None:
        if self.rows * math.prod(max(size, 1) for size in self.shape) * self.dtype.itemsize >= 2**63:
            raise HarvestError(
                f"{str(self.path)!r} cannot have {self.rows} rows of shape {self.shape}: its journal or the"
                " manifest is broken"
            )
        if not self.nbytes:
            return
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise HarvestError(
                f"cannot read {str(self.path)!r}: {error.strerror or error}; if it is gone, call harvest again, which"
                " writes its shard again"
            ) from error
        if size < PAGE + self.nbytes:
            raise HarvestError(
                f"{str(self.path)!r} is broken: expected {PAGE + self.nbytes} bytes for {self.rows} rows, got {size};"
                " call harvest again, which writes its shard again"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "scattered"}  # a map cannot be pickled

    @property
    def row_bytes(self) -> int:
        """The size of one row."""
        return row_bytes(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all rows."""
        return self.rows * self.row_bytes

    def span(self, start: int, stop: int) -> Tensor:
        """Consecutive rows: a view of the file, or a copy if they are few."""
        if (stop - start) * self.row_bytes >= _SMALL:
            return self.mapped(start, stop)
        found = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        self.read(found, start)
        return found

    def read(self, into: Tensor, start: int) -> None:
        """Fill `into`, a contiguous tensor, with the rows from `start` on."""
        memory = as_bytes(into)
        with FileIO(self.path) as file:
            file.seek(PAGE + start * self.row_bytes)
            while len(memory):
                count = file.readinto(memory)
                if not count:
                    raise HarvestError(f"{str(self.path)!r} became shorter while it was read")
                memory = memory[count:]

    def expect(self, start: int, stop: int) -> None:
        """Have the system read these rows from the disk; where that is not possible, reading them is only slower."""
        if hasattr(os, "posix_fadvise") and start < stop:
            with suppress(OSError), FileIO(self.path) as file:  # a file that cannot be read says so when its rows are
                for at in range(PAGE + start * self.row_bytes, PAGE + stop * self.row_bytes, _READAHEAD):
                    os.posix_fadvise(file.fileno(), at, _READAHEAD, os.POSIX_FADV_WILLNEED)

    def mapped(self, start: int, stop: int) -> Tensor:
        """Consecutive rows in a map of their own, which is released with the last tensor that uses it."""
        if start == stop or not self.row_bytes:
            return torch.empty(stop - start, *self.shape, dtype=self.dtype)
        first, end = PAGE + start * self.row_bytes, PAGE + stop * self.row_bytes
        # Unlike Python's mmap this keeps no file open; a process may have as few as 256 open files.
        file = torch.from_file(str(self.path), shared=False, size=end, dtype=torch.uint8)
        memory: Any = (ctypes.c_char * (end - first)).from_address(file.data_ptr() + first)
        memory.owner = file
        # Not file[first:]: torch.save, or a queue to another process, would take the whole file along.
        return torch.frombuffer(memory, dtype=self.dtype).view(stop - start, *self.shape)

    @cached_property
    def scattered(self) -> Tensor:
        """All rows in one permanent map for random access, without read-ahead by the system."""
        found = self.mapped(0, self.rows)
        _expect_random(found)
        return found


@dataclass(frozen=True)
class RepeatedRows:
    """The rows of a file with one row per sample, each repeated as often as its sample has rows by `offsets`."""

    part: RowFile
    offsets: RowFile
    rows: int

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_starts"}  # a map cannot be pickled

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the file."""
        return self.part.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return self.part.shape

    @property
    def row_bytes(self) -> int:
        """The size of one row."""
        return self.part.row_bytes

    def expect(self, start: int, stop: int) -> None:
        """Nothing: a sample has a single row in the file."""

    def span(self, start: int, stop: int) -> Tensor:
        """Consecutive rows."""
        found = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        self.read(found, start)
        return found

    def read(self, into: Tensor, start: int) -> None:
        """Fill `into`, which must not be empty, with the rows from `start` on."""
        samples = torch.bucketize(torch.arange(start, start + len(into)), self._starts[1:], right=True)
        first, last = int(samples[0]), int(samples[-1])
        torch.index_select(self.part.span(first, last + 1), 0, samples - first, out=into)

    @cached_property
    def _starts(self) -> Tensor:
        return sample_starts(self.offsets, self.rows)


ShardRows: TypeAlias = RowFile | RepeatedRows


def sample_starts(offsets: RowFile, rows: int) -> Tensor:
    """Where in the rows of a shard each sample starts; the last number is where the last sample ends."""
    found = offsets.mapped(0, offsets.rows)
    if int(found[0]) or int(found[-1]) != rows or bool((found.diff() < 0).any()):
        raise HarvestError(f"{str(offsets.path)!r} is broken: its offsets do not cover the {rows} rows of its shard")
    return found


def _expect_random(mapped: Tensor) -> None:
    """Ask the system not to read ahead; where that is not possible, random access is only slower."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return
    start = mapped.data_ptr() - PAGE  # where the map starts
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(mapped.nbytes + PAGE), ctypes.c_int(_RANDOM))


class Span(NamedTuple):
    """Consecutive rows of one part."""

    part: int
    start: int
    stop: int


class Pick(NamedTuple):
    """Rows to copy from one part, and where to."""

    part: RowFile
    rows: Tensor
    into: Tensor


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where each part starts, and where the last one ends.

    >>> starts_of([3, 2])
    [0, 3, 5]
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def spans(starts: Sequence[int], start: int, stop: int) -> Iterator[Span]:
    """Which rows of which parts are the rows from `start` to `stop`.


    [Span(part=0, start=2, stop=3), Span(part=1, start=0, stop=2)]
    """
    while start < stop:
        part = bisect_right(starts, start) - 1
        end = min(stop, starts[part + 1])
        yield Span(part, start - starts[part], end - starts[part])
        start = end


def spanned(parts: Sequence[ShardRows], starts: Sequence[int], start: int, stop: int) -> Tensor:
    """Consecutive rows, at least one: a view if they are in one part, a copy if in several."""
    found = [parts[span.part].span(span.start, span.stop) for span in spans(starts, start, stop)]
    return found[0] if len(found) == 1 else torch.cat(found)


def expect(parts: Sequence[ShardRows], starts: Sequence[int], start: int, stop: int) -> None:
    """Have the system read consecutive rows from the disk."""
    for span in spans(starts, start, stop):
        parts[span.part].expect(span.start, span.stop)


def gathered(parts: Sequence[RowFile], starts: Sequence[int], rows: Tensor, empty: Tensor) -> Tensor:
    """Rows in any order: copied part by part, with threads if they are not in memory, then brought into order."""
    found = torch.empty(len(rows), *empty.shape[1:], dtype=empty.dtype)
    if not found.numel():
        return found
    part_of = torch.bucketize(rows, torch.tensor(starts[1:]), right=True)
    order = part_of.argsort(stable=True)
    inside = (rows - torch.tensor(starts)[part_of])[order]
    counts = torch.bincount(part_of, minlength=len(parts)).tolist()
    size = max(1, _PIECE * len(rows) // found.numel())
    picks = [
        Pick(part, some, into)
        for part, of_part, place in zip(parts, inside.split(counts), as_plain(found).split(counts), strict=True)
        for some, into in zip(of_part.split(size), place.split(size), strict=True)
        if len(some)
    ]
    _pick_all(picks)
    if max(counts) == len(rows):
        return found
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return as_plain(found).index_select(0, back).view(found.dtype)


def _pick_all(picks: Sequence[Pick]) -> None:
    """Copy rows in this thread, which is fastest while they are in memory; once a copy is slow, in several threads."""
    for number, pick in enumerate(picks, 1):
        start = perf_counter()
        _pick(pick)
        if perf_counter() - start > _SLOW:
            with ThreadPoolExecutor(_THREADS) as pool:  # a permanent pool would not survive a fork
                list(pool.map(_pick, picks[number:]))
            return


def _pick(pick: Pick) -> None:
    torch.index_select(as_plain(pick.part.scattered), 0, pick.rows, out=pick.into)


def as_plain(x: Tensor) -> Tensor:
    """The same memory as integers, so that every dtype can be copied alike.

    >>> as_plain(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.int16
    """
    return x.view(_PLAIN[x.dtype.itemsize])


def check(files: Sequence[RowFile], progress: Progress) -> int:
    """Read all rows of `files` and return their size; raises a `HarvestError` that names all broken files."""
    pieces = sum(-(-part.rows // _rows_per_piece(part)) for part in files)
    label = f"checking pieces of {_CHECK_BYTES >> 20} MiB"
    found = dict(track(_checksums(files), pieces, label, progress))  # the last checksum of a file covers all of it
    broken = [part for part in files if found.get(part, 0) != part.crc32 or not _header_fits(part)]
    if broken:
        names = ", ".join(repr(str(part.path)) for part in broken)
        raise HarvestError(
            f"broken files, which do not match their checksums: {names}; delete these files and call harvest again,"
            " which writes their shards again"
        )
    return sum(part.nbytes for part in files)


def _checksums(files: Sequence[RowFile]) -> Iterator[tuple[RowFile, int]]:
    """Each file with its checksum so far, after each piece of it."""
    for part in files:
        crc32, step = 0, _rows_per_piece(part)
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


def _header_fits(part: RowFile) -> bool:
    """Whether the header describes these rows; not checked while a file grows, since it may be ahead of the journal."""
    if not part.done:
        return True
    try:
        with part.path.open("rb") as file:
            return file.read(PAGE) == header(part.name, part.dtype, (part.rows, *part.shape))
    except OSError:
        return False


def _rows_per_piece(part: RowFile) -> int:
    return max(1, _CHECK_BYTES // max(1, part.row_bytes))
