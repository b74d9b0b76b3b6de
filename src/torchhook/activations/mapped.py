"""The rows of one shard as a reader sees them: so many as are committed, mapped or read where they lie; or repeated.

What is mapped is private: a tensor of it can be written to, and neither the file nor any other tensor changes.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchhook.captures.appendable import PAGE, as_bytes, row_bytes
from torchhook.core.errors import HarvestError

_SMALL = 64 * 1024  # bytes: reading so few is faster than mapping them, and a process may have 65530 maps
_RANDOM = 1  # MADV_RANDOM, everywhere


@dataclass(frozen=True)
class Part:
    """The committed rows of one file, as its journal tells of them.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import tempfile
    >>> from torchhook.captures.appendable import Growing
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
    ...     path = Path(folder) / "x.safetensors"
    ...     file = Growing(path, "values", torch.float32, (2,), pool)
    ...     file.append(torch.arange(6.0).view(3, 2)), file.close()
    ...     Part(path, "values", torch.float32, (2,), 2).span(1, 2)
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
        memory, place = as_bytes(into), PAGE + start * self.row_bytes
        file = os.open(self.path, os.O_RDONLY)
        try:
            while len(memory):
                count = os.preadv(file, [memory], place)
                if not count:
                    raise HarvestError(f"{str(self.path)!r} became shorter while it was read")
                memory, place = memory[count:], place + count
        finally:
            os.close(file)

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
class Spread:
    """The rows of a file with one a sample, each as often as `offsets` say that its sample has rows elsewhere."""

    part: Part
    offsets: Part
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
        return begins(self.offsets, self.rows)


Stretch: TypeAlias = Part | Spread


def begins(offsets: Part, rows: int) -> Tensor:
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
