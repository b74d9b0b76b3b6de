"""The rows of one shard as a reader sees them: so many as are committed, mapped or read where they lie; or repeated.

What is mapped is private: a tensor of it can be written to, and neither the file nor any other tensor changes.
"""

from __future__ import annotations

import ctypes
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from io import FileIO
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TextIO, TypeAlias

import torch
from torch import Tensor

from torchhook.captures.appendable import PAGE, as_bytes, header, row_bytes
from torchhook.core.errors import HarvestError
from torchhook.core.progress import track

_SMALL = 64 * 1024  # bytes: reading so few is faster than mapping them, and a process may have 65530 maps
_RANDOM = 1  # MADV_RANDOM, everywhere


@dataclass(frozen=True)
class RowFile:
    """The committed rows of one file, as its journal tells of them.

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
    name: str  # of the tensor in it
    dtype: torch.dtype
    shape: tuple[int, ...]  # of a row
    rows: int
    crc32: int = 0
    done: bool = False  # whether the file is as it will stay

    def __post_init__(self) -> None:
        if not self.nbytes:
            return
        try:
            there = self.path.stat().st_size
        except OSError as error:
            raise HarvestError(
                f"{str(self.path)!r} cannot be read: {error.strerror or error}; if it is gone, call harvest again,"
                " which makes its shard anew"
            ) from error
        if there < PAGE + self.nbytes:
            raise HarvestError(
                f"{str(self.path)!r} is broken: its journal tells of {self.rows} rows, {PAGE + self.nbytes} bytes, and"
                f" the file has {there}; call harvest again, which makes its shard anew"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "scattered"}  # mapped anew where it goes

    @property
    def row_bytes(self) -> int:
        """What one row takes."""
        return row_bytes(self.dtype, self.shape)

    @property
    def nbytes(self) -> int:
        """What all rows take."""
        return self.rows * self.row_bytes

    def span(self, start: int, stop: int) -> Tensor:
        """Consecutive rows: many are a view of the file, a few are read."""
        if (stop - start) * self.row_bytes >= _SMALL:
            return self.mapped(start, stop)
        found = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        self.read(found, start)
        return found

    def read(self, into: Tensor, start: int) -> None:
        """Fill `into`, which is contiguous, with the rows from `start` on."""
        memory = as_bytes(into)
        with FileIO(self.path) as file:
            file.seek(PAGE + start * self.row_bytes)
            while len(memory):
                count = file.readinto(memory)
                if not count:
                    raise HarvestError(f"{str(self.path)!r} became shorter while it was read")
                memory = memory[count:]

    def mapped(self, start: int, stop: int) -> Tensor:
        """Consecutive rows in a map of their own, which goes when the last tensor of it does."""
        if start == stop or not self.row_bytes:
            return torch.empty(stop - start, *self.shape, dtype=self.dtype)
        first, end = PAGE + start * self.row_bytes, PAGE + stop * self.row_bytes
        # Unlike Python's mmap it keeps no file open, of which a process may have as few as 256.
        file = torch.from_file(str(self.path), shared=False, size=end, dtype=torch.uint8)
        memory: Any = (ctypes.c_char * (end - first)).from_address(file.data_ptr() + first)
        memory.owner = file
        # And not file[first:], of which torch.save, or a queue to another process, would take all of the file.
        return torch.frombuffer(memory, dtype=self.dtype).view(stop - start, *self.shape)

    @cached_property
    def scattered(self) -> Tensor:
        """All rows in one map that stays, for reading here and there: the system reads no pages ahead."""
        found = self.mapped(0, self.rows)
        _expect_random(found)
        return found


@dataclass(frozen=True)
class RepeatedRows:
    """The rows of a file with one a sample, each as often as `offsets` say that its sample has rows elsewhere."""

    part: RowFile
    offsets: RowFile
    rows: int

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_begins"}  # mapped anew where it goes

    @property
    def dtype(self) -> torch.dtype:
        """As that of the file."""
        return self.part.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a row."""
        return self.part.shape

    @property
    def row_bytes(self) -> int:
        """What one row takes."""
        return self.part.row_bytes

    def span(self, start: int, stop: int) -> Tensor:
        """Consecutive rows."""
        found = torch.empty(stop - start, *self.shape, dtype=self.dtype)
        self.read(found, start)
        return found

    def read(self, into: Tensor, start: int) -> None:
        """Fill `into`, which is not empty, with the rows from `start` on."""
        samples = torch.bucketize(torch.arange(start, start + len(into)), self._begins[1:], right=True)
        first, last = int(samples[0]), int(samples[-1])
        torch.index_select(self.part.span(first, last + 1), 0, samples - first, out=into)

    @cached_property
    def _begins(self) -> Tensor:
        return sample_starts(self.offsets, self.rows)


ShardRows: TypeAlias = RowFile | RepeatedRows


def sample_starts(offsets: RowFile, rows: int) -> Tensor:
    """Where among so many rows of a shard those of each sample begin; the last number is where they end."""
    found = offsets.mapped(0, offsets.rows)
    if int(found[0]) or int(found[-1]) != rows or bool((found.diff() < 0).any()):
        raise HarvestError(f"{str(offsets.path)!r} is broken: it does not share out the {rows} rows of its shard")
    return found


def _expect_random(mapped: Tensor) -> None:
    """Say so to the system, if it listens; if not, reading is slower, and nothing else."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return
    start = mapped.data_ptr() - PAGE  # where the map begins
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(mapped.nbytes + PAGE), ctypes.c_int(_RANDOM))


_THREADS = 8  # for a page that is not in memory each waits for the disk, which serves several at a time
_PIECE = 1 << 15  # values: for more, torch itself would begin threads, in each of ours
_SLOW = 1e-3  # seconds for a piece, of which copying takes a tenth
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Span(NamedTuple):
    """Consecutive rows of one part."""

    part: int
    start: int
    stop: int


class Pick(NamedTuple):
    """Rows of one part, and the memory for them."""

    part: RowFile
    rows: Tensor
    into: Tensor


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends.

    >>> starts_of([3, 2])
    [0, 3, 5]
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def runs(starts: Sequence[int], start: int, stop: int) -> Iterator[Span]:
    """Where the rows from `start` to `stop` lie.

    >>> list(runs([0, 3, 5], 2, 5))
    [Span(part=0, start=2, stop=3), Span(part=1, start=0, stop=2)]
    """
    while start < stop:
        part = bisect_right(starts, start) - 1
        end = min(stop, starts[part + 1])
        yield Span(part, start - starts[part], end - starts[part])
        start = end


def spanned(parts: Sequence[ShardRows], starts: Sequence[int], start: int, stop: int) -> Tensor:
    """Consecutive rows, at least one: of one part as they lie there, of several together."""
    found = [parts[run.part].span(run.start, run.stop) for run in runs(starts, start, stop)]
    return found[0] if len(found) == 1 else torch.cat(found)


def gathered(parts: Sequence[RowFile], starts: Sequence[int], rows: Tensor, empty: Tensor) -> Tensor:
    """Rows from anywhere, by several threads: part after part, and then in the order that was asked for."""
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
    """In this thread, which is the fastest, as long as rows are in memory; in several from the first that is not."""
    for number, pick in enumerate(picks, 1):
        began = perf_counter()
        _pick(pick)
        if perf_counter() - began > _SLOW:
            with ThreadPoolExecutor(_THREADS) as pool:  # one that stays would not outlive a fork
                list(pool.map(_pick, picks[number:]))
            return


def _pick(pick: Pick) -> None:
    torch.index_select(as_plain(pick.part.scattered), 0, pick.rows, out=pick.into)


def as_plain(x: Tensor) -> Tensor:
    """The same memory as whole numbers, which can be picked and put whatever the dtype is.

    >>> as_plain(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.int16
    """
    return x.view(_PLAIN[x.dtype.itemsize])


_CHECK_BYTES = 8 * 2**20  # bytes at a time
_UNREADABLE = -1  # which no checksum is


def check(files: Sequence[RowFile], progress: TextIO | None) -> int:
    """Read all rows of `files`; how many bytes. A `HarvestError` names all that are broken."""
    pieces = sum(-(-part.rows // _rows(part)) for part in files)
    found = dict(
        track(_checksums(files), pieces, f"{_CHECK_BYTES >> 20} MiB", progress)
    )  # the last of a file is of all
    broken = [part for part in files if found.get(part, 0) != part.crc32 or not _begins_right(part)]
    if broken:
        names = ", ".join(repr(str(part.path)) for part in broken)
        raise HarvestError(
            f"not as they were written: {names}; delete these files and call harvest again, which makes their shards"
            " anew"
        )
    return sum(part.nbytes for part in files)


def _checksums(files: Sequence[RowFile]) -> Iterator[tuple[RowFile, int]]:
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


def _begins_right(part: RowFile) -> bool:
    """Whether the header is that of these rows; while a file grows it may be ahead of the journal, or torn."""
    if not part.done:
        return True
    try:
        with part.path.open("rb") as file:
            return file.read(PAGE) == header(part.name, part.dtype, (part.rows, *part.shape))
    except OSError:
        return False


def _rows(part: RowFile) -> int:
    return max(1, _CHECK_BYTES // max(1, part.row_bytes))
