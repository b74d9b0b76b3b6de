"""Batches of rows, in order or shuffled, for a loop or for the workers of a `DataLoader`.

Shuffling reads nearly as fast as reading in order: blocks of neighbouring rows are read in random order, by several
threads, into one of two buffers, while rows are drawn in random order from the other. Each row comes once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle, starmap
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from torchhook.activations.mapped import ShardRows, Span, as_plain, expect, spanned, starts_of
from torchhook.core.tap import require_count

_T = TypeVar("_T", covariant=True)
_WINDOW = 4 * 2**20  # bytes mapped at a time, so that memory of rows already read can be released
_AHEAD = 16 * 2**20  # bytes that the system reads beyond those: it would not know that the next map follows the last
_ROWS = 64  # at least, in a block: row by row, reading takes about ten times as long
_BYTES = 256 * 1024  # at least, in a block of small rows
_MIXED = 64  # blocks at least in a buffer, for large rows
_THREADS = 4


class WorkerShare(NamedTuple):
    """Which worker this is, out of how many."""

    worker: int = 0
    workers: int = 1

    @classmethod
    def of_this_process(cls) -> WorkerShare:
        """The share of this worker of a `DataLoader`; everything outside of one."""
        info = get_worker_info()
        return cls(info.id, info.num_workers) if info else cls()


class Batches(IterableDataset[_T]):
    """Batches of one or several columns; each loop over them yields the same batches in the same order."""

    def __init__(
        self,
        columns: Sequence[Sequence[ShardRows]],
        made: Callable[[list[Tensor]], _T],
        size: int,
        shuffle: bool,
        seed: int,
        memory_bytes: int,
    ) -> None:
        """The parts of all `columns` have the same lengths; `made` turns the rows of each column into one batch."""
        if size < 1:
            raise ValueError(f"size must be at least 1 row, not {size}")
        require_count(memory_bytes, "memory_bytes")
        self._columns = columns
        self._made = made
        self._size = size
        self._seed = seed
        self._memory = memory_bytes if shuffle else None
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
            found = ([rows.clone() for rows in batch] for batch in found)  # a view would send its whole storage along
        return map(self._made, found)

    def __len__(self) -> int:
        """The number of batches of all workers together."""
        return -(-sum(self._lengths) // self._size)

    def _in_order(self, share: WorkerShare) -> Iterator[list[Tensor]]:
        """All batches in order; several workers take turns, so that a DataLoader yields them in order, too."""
        starts, size = starts_of(self._lengths), self._size
        rows, ends = starts[-1], starts[1:]
        window, start = max(1, _WINDOW // (size * self._width)) * size, 0
        expected = 0
        with ThreadPoolExecutor(1) as pool:
            while start < rows:
                until = min(rows, start + window + _AHEAD // self._width)
                for parts in self._columns:
                    pool.submit(expect, parts, starts, expected, until)
                expected = until
                inside = (ends[bisect_right(ends, start)] - start) // size * size  # rows of whole batches in one file
                stop = min(rows, start + (min(window, inside) or size))
                spans = [spanned(parts, starts, start, stop) for parts in self._columns]
                for at in range(start, stop, size):
                    if at // size % share.workers == share.worker:
                        yield [span[at - start : at - start + size] for span in spans]
                start = stop


class Blocks(NamedTuple):
    """Which rows are read together, and how many such blocks a buffer holds."""

    lengths: tuple[int, ...]  # rows of each part
    rows: int  # rows per block; the last block of a part may be shorter
    held: int  # blocks per buffer

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, memory: int) -> Blocks:
        """The blocks for parts of these lengths, rows of `width` bytes, and two buffers in `memory` bytes.


        2
        """
        enough = -(-_BYTES // width)
        rows = max(enough, min(_ROWS, memory // 2 // width // _MIXED))
        return cls(tuple(lengths), rows, max(1, memory // 2 // (rows * width)))

    def mixed(self, generator: torch.Generator, begin: int, end: int) -> Tensor:
        """Part, start and stop of each block in random order, cut to the rows from `begin` to `end` of that order.

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
    """A buffer being filled: one tensor per column, the number of rows, and the reads still under way."""

    buffers: list[Tensor]
    rows: int
    reading: list[Future[None]]

    def filled(self) -> list[Tensor]:
        """Wait for the reads, and return the rows."""
        for one in self.reading:
            one.result()
        return [buffer[: self.rows] for buffer in self.buffers]


def shuffled(
    columns: Sequence[Sequence[ShardRows]], blocks: Blocks, size: int, seed: int, worker: int = 0, workers: int = 1
) -> Iterator[list[Tensor]]:
    """Batches of shuffled rows, of columns whose parts have the same lengths; for a worker, its share of them.

    A share has whole batches, so that the number of batches does not depend on the number of workers, and only the
    last batch of all may be smaller.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(blocks.lengths)
    batches = -(-total // size)
    begin, end = (min(total, turn * batches // workers * size) for turn in (worker, worker + 1))
    batch: list[Tensor] = []
    missing = 0  # rows that the current batch still lacks
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
                batch = []  # lets the caller release it before the next one is made


def _filled(columns: Sequence[Sequence[ShardRows]], blocks: Blocks, mixed: Tensor) -> Iterator[list[Tensor]]:
    """One buffer after the other; while one is used, the next is filled."""
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
    """Start to read blocks, in the order of the files: the rows are shuffled in the buffer."""
    start, reading = 0, []
    for span in starmap(Span, sorted(chosen.tolist())):
        stop = start + span.stop - span.start
        for parts, buffer in zip(columns, buffers, strict=True):
            reading.append(pool.submit(parts[span.part].read, buffer[start:stop], span.start))
        start = stop
    return Filling(buffers, start, reading)
