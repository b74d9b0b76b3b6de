"""Batches of rows, in order or mixed: what a loop takes, and what a `DataLoader` shares out among its workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from torchhook.harvesting.indexing import starts_of
from torchhook.harvesting.shuffling import Blocks, shuffled

if TYPE_CHECKING:
    from torchhook.harvesting.column import Column

_T = TypeVar("_T", covariant=True)
_WINDOW = 16 * 2**20  # bytes that are mapped at a time, so that what was read can go


class Share(NamedTuple):
    """Which of several workers this is."""

    worker: int = 0
    workers: int = 1

    @classmethod
    def of_this_process(cls) -> Share:
        """That of a worker of a `DataLoader`, or all."""
        info = get_worker_info()
        return cls(info.id, info.num_workers) if info else cls()


class Batches(IterableDataset[_T]):
    """Batches of one or several columns, which can be gone through again and again, in the same order."""

    def __init__(
        self,
        columns: Sequence[Column],
        made: Callable[[list[Tensor]], _T],
        size: int,
        shuffle: bool,
        seed: int,
        memory_mb: float,
        workers: int = 1,
    ) -> None:
        """What of `columns` is in a batch becomes one by `made`; `workers` only say how many batches there are."""
        if size < 1:
            raise ValueError(f"size must be at least 1 row, not {size}")
        if memory_mb <= 0:
            raise ValueError(f"memory_mb must be more than 0, not {memory_mb}")
        self._columns = columns
        self._made = made
        self._size = size
        self._seed = seed
        self._workers = max(1, workers)
        self._memory = int(memory_mb * 2**20) if shuffle else None

    def __iter__(self) -> Iterator[_T]:
        share = Share.of_this_process()
        if self._memory is None:
            found = in_order(self._columns, self._size, share)
        else:
            blocks = self._blocks(share.workers)
            found = shuffled([column.parts for column in self._columns], blocks, self._size, self._seed, *share)
        if share.workers > 1 or get_worker_info():
            found = ([rows.clone() for rows in batch] for batch in found)  # a view would take all it is a view of along
        return map(self._made, found)

    def __len__(self) -> int:
        """How many batches there are."""
        rows = [len(self._columns[0])]
        if self._memory is not None:
            rows = self._blocks(self._workers).shares(self._seed, self._workers)
        return sum(-(-count // self._size) for count in rows)

    def _blocks(self, workers: int) -> Blocks:
        assert self._memory is not None
        parts = [column.parts for column in self._columns]
        width = sum(part[0].row_bytes for part in parts if part)
        return Blocks.of([part.rows for part in parts[0]], width, self._memory // workers)


def in_order(columns: Sequence[Column], size: int, share: Share) -> Iterator[list[Tensor]]:
    """Batch after batch; of several workers each makes those of its turns, so that all together are in order."""
    rows, ends = len(columns[0]), starts_of([part.rows for part in columns[0].parts])[1:]
    width = max(1, sum(column.nbytes for column in columns) // max(1, rows))
    window, start = max(1, _WINDOW // (size * width)) * size, 0
    while start < rows:
        inside = (ends[bisect_right(ends, start)] - start) // size * size  # so many rows are whole batches of one file
        stop = min(rows, start + (min(window, inside) or size))
        spans = [column.span(start, stop) for column in columns]
        for at in range(start, stop, size):
            if at // size % share.workers == share.worker:
                yield [span[at - start : at - start + size] for span in spans]
        start = stop
