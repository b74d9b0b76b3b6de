"""Batches of rows, in order or mixed: what a loop takes, and what a `DataLoader` shares out among its workers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, starmap
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from torchhook.activations.mapped import ShardRows, Span, as_plain, spanned, starts_of

_T = TypeVar("_T", covariant=True)
_WINDOW = 4 * 2**20  # bytes that are mapped at a time, so that what was read can go


class WorkerShare(NamedTuple):
    """Which of several workers this is."""

    worker: int = 0
    workers: int = 1

    @classmethod
    def of_this_process(cls) -> WorkerShare:
        """That of a worker of a `DataLoader`, or all."""
        info = get_worker_info()
        return cls(info.id, info.num_workers) if info else cls()


class Batches(IterableDataset[_T]):
    """Batches of one or several columns, which can be gone through again and again, in the same order."""

    def __init__(
        self,
        columns: Sequence[Sequence[ShardRows]],
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
        share = WorkerShare.of_this_process()
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

    def _in_order(self, share: WorkerShare) -> Iterator[list[Tensor]]:
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


_ROWS = 64  # at least in a block: alone they take about ten times as long
_BYTES = 256 * 1024  # at least in a block, if rows are small
_MIXED = 64  # blocks at least in a buffer, if rows are large
_THREADS = 4


class Blocks(NamedTuple):
    """Which rows are read together, and how many such blocks a buffer holds."""

    lengths: tuple[int, ...]  # of the parts
    rows: int  # in a block; the last of a part may be shorter
    held: int

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, memory: int) -> Blocks:
        """Those of parts of so many rows, each of `width` bytes, for two buffers in `memory` bytes.

        >>> Blocks.of([1000, 100], 1024, 2**28)
        Blocks(lengths=(1000, 100), rows=256, held=512)
        >>> Blocks.of([1000], 2**20, 2**28).rows  # of 1 MiB: 64 together would be too few blocks for a mixture
        2
        """
        enough = -(-_BYTES // width)
        rows = max(enough, min(_ROWS, memory // 2 // width // _MIXED))
        return cls(tuple(lengths), rows, max(1, memory // 2 // (rows * width)))

    def mixed(self, generator: torch.Generator, begin: int, end: int) -> Tensor:
        """All blocks in random order, of which are left the rows from `begin` to `end`: part, start and stop of each.

        >>> Blocks((5, 2), rows=3, held=9).mixed(torch.Generator().manual_seed(0), 0, 6)
        tensor([[1, 0, 2],
                [0, 0, 3],
                [0, 3, 4]])
        """
        firsts = torch.tensor(starts_of([-(-length // self.rows) for length in self.lengths]))
        order = torch.randperm(int(firsts[-1]), generator=generator)
        part = torch.bucketize(order, firsts[1:], right=True)
        start = (order - firsts[part]) * self.rows
        stop = torch.minimum(start + self.rows, torch.tensor(self.lengths)[part])
        ends = (stop - start).cumsum(0)
        begins = ends - (stop - start)
        start, stop = start + (begin - begins).clamp(min=0), stop - (ends - end).clamp(min=0)
        return torch.stack([part, start, stop], 1)[start < stop]


class Filling(NamedTuple):
    """A buffer that is being filled: a tensor a column, so many rows of it, and what is still under way."""

    buffers: list[Tensor]
    rows: int
    reading: list[Future[None]]

    def filled(self) -> list[Tensor]:
        """The rows, when all are there."""
        for one in self.reading:
            one.result()
        return [buffer[: self.rows] for buffer in self.buffers]


def shuffled(
    columns: Sequence[Sequence[ShardRows]], blocks: Blocks, size: int, seed: int, worker: int = 0, workers: int = 1
) -> Iterator[list[Tensor]]:
    """Batches of the mixed rows of columns, whose parts are of the same lengths; for a worker, its share of them.

    A share is of whole batches, so that their number does not depend on that of the workers, and only the very last
    batch may be short.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(blocks.lengths)
    batches = -(-total // size)
    begin, end = (min(total, turn * batches // workers * size) for turn in (worker, worker + 1))
    batch: list[Tensor] = []
    missing = 0  # rows of the batch
    for buffers in _filled(columns, blocks, blocks.mixed(generator, begin, end)):
        mixed = torch.randperm(len(buffers[0]), generator=generator)
        while len(mixed):
            if not missing:
                missing = min(size, end - begin)
                batch = [buffer.new_empty(missing, *buffer.shape[1:]) for buffer in buffers]
            drawn, mixed = mixed[:missing], mixed[missing:]
            for buffer, rows in zip(buffers, batch, strict=True):
                place = len(rows) - missing
                into = as_plain(rows)[place : place + len(drawn)]
                torch.index_select(as_plain(buffer), 0, drawn, out=into)
            begin, missing = begin + len(drawn), missing - len(drawn)
            if not missing:
                yield batch
                batch = []  # whoever has it may let it go before the next is made


def _filled(columns: Sequence[Sequence[ShardRows]], blocks: Blocks, mixed: Tensor) -> Iterator[list[Tensor]]:
    """One buffer after the other; while one is used the next is filled."""
    if not len(mixed):
        return
    turns = mixed.split(blocks.held)
    rows = len(turns[0]) * blocks.rows
    pair = [[torch.empty(rows, *parts[0].shape, dtype=parts[0].dtype) for parts in columns] for _ in turns[:2]]
    pool = ThreadPoolExecutor(_THREADS)
    try:
        under_way: Filling | None = None
        for chosen, buffers in zip(turns, cycle(pair), strict=False):
            following = _fill(pool, columns, chosen, buffers)
            if under_way:
                yield under_way.filled()
            under_way = following
        assert under_way
        yield under_way.filled()
    finally:
        pool.shutdown(cancel_futures=True)


def _fill(
    pool: ThreadPoolExecutor, columns: Sequence[Sequence[ShardRows]], chosen: Tensor, buffers: list[Tensor]
) -> Filling:
    """Begin to read blocks: in the order of the files, since their rows are mixed afterwards."""
    start, reading = 0, []
    for run in starmap(Span, sorted(chosen.tolist())):
        stop = start + run.stop - run.start
        for parts, buffer in zip(columns, buffers, strict=True):
            reading.append(pool.submit(parts[run.part].read, buffer[start:stop], run.start))
        start = stop
    return Filling(buffers, start, reading)
