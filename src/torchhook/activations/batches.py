"""Batches of rows, in order or mixed: what a loop takes, and what a `DataLoader` shares out among its workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from torchhook.activations.indexing import spanned, starts_of
from torchhook.activations.mapped import Stretch
from torchhook.activations.shuffle import Blocks, shuffled

_T = TypeVar("_T", covariant=True)
_WINDOW = 4 * 2**20  # bytes that are mapped at a time, so that what was read can go


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
        columns: Sequence[Sequence[Stretch]],
        made: Callable[[list[Tensor]], _T],
        size: int,
        shuffle: bool,
        seed: int,
        memory_mb: float,
    ) -> None:
        """What of `columns`, whose parts are of the same lengths, is in a batch becomes one by `made`."""
        if size < 1:
            raise ValueError(f"size must be at least 1 row, not {size}")
        if memory_mb <= 0:
            raise ValueError(f"memory_mb must be more than 0, not {memory_mb}")
        self._columns = columns
        self._made = made
        self._size = size
        self._seed = seed
        self._memory = int(memory_mb * 2**20) if shuffle else None
        self._lengths = [part.rows for part in columns[0]]
        self._width = max(1, sum(parts[0].row_bytes for parts in columns if parts))

    def __iter__(self) -> Iterator[_T]:
        share = Share.of_this_process()
        if self._memory is None:
            found = self._in_order(share)
        else:
            blocks = Blocks.of(self._lengths, self._width, self._memory // share.workers)
            found = shuffled(self._columns, blocks, self._size, self._seed, *share)
        if get_worker_info():
            found = ([rows.clone() for rows in batch] for batch in found)  # a view would take all it is a view of along
        return map(self._made, found)

    def __len__(self) -> int:
        """How many batches there are, of all workers together."""
        return -(-sum(self._lengths) // self._size)

    def _in_order(self, share: Share) -> Iterator[list[Tensor]]:
        """Batch after batch; of several workers each makes those of its turns, so that all together are in order."""
        starts, size = starts_of(self._lengths), self._size
        rows, ends = starts[-1], starts[1:]
        window, start = max(1, _WINDOW // (size * self._width)) * size, 0
        while start < rows:
            inside = (ends[bisect_right(ends, start)] - start) // size * size  # so many are whole batches of one file
            stop = min(rows, start + (min(window, inside) or size))
            spans = [spanned(parts, starts, start, stop) for parts in self._columns]
            for at in range(start, stop, size):
                if at // size % share.workers == share.worker:
                    yield [span[at - start : at - start + size] for span in spans]
            start = stop
