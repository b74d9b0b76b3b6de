"""One file of a store as a reader sees it: so many rows as are committed, mapped or read where they lie.

What is mapped is private: a tensor of it can be written to, and neither the file nor any other tensor changes.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook.errors import HarvestError
from torchhook.harvesting.growing import PAGE, as_bytes, row_bytes

_SMALL = 64 * 1024  # bytes: reading so few is faster than mapping them, and a process may have 65530 maps
_RANDOM = 1  # MADV_RANDOM, everywhere


@dataclass(frozen=True)
class Part:
    """The committed rows of one file.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import tempfile
    >>> from torchhook.harvesting.growing import Growing
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
    ...     path = Path(folder) / "x.safetensors"
    ...     file = Growing(path, "values", torch.float32, (2,), pool)
    ...     file.append(torch.arange(6.0).view(3, 2)), file.close()
    ...     Part(path, torch.float32, (2,), 2).span(1, 2)
    (None, None)
    tensor([[2., 3.]])
    """

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: int

    def __post_init__(self) -> None:
        if not self.nbytes:
            return
        try:
            there = self.path.stat().st_size
        except OSError as error:
            raise HarvestError(f"{str(self.path)!r} cannot be read: {error.strerror or error}") from error
        if there < PAGE + self.nbytes:
            raise HarvestError(
                f"{str(self.path)!r} is broken: its journal tells of {self.rows} rows, {PAGE + self.nbytes} bytes, and"
                f" the file has {there}"
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


def _expect_random(mapped: Tensor) -> None:
    """Say so to the system, if it listens; if not, reading is slower, and nothing else."""
    try:
        madvise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError, TypeError):
        return
    start = mapped.data_ptr() - PAGE  # where the map begins
    madvise(ctypes.c_void_p(start), ctypes.c_size_t(mapped.nbytes + PAGE), ctypes.c_int(_RANDOM))
