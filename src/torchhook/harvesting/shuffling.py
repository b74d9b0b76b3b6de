"""Rows in random order at nearly the speed of rows in order: blocks of neighbours, mixed in memory.

Blocks are read in random order, by several threads, into one of two buffers; meanwhile rows are drawn from the other,
in random order, until it is empty. Every row comes once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.harvesting.indexing import Run, as_plain, starts_of
from torchhook.harvesting.parts import Part

_ROWS = 64  # at least in a block: alone they take about ten times as long
_BYTES = 256 * 1024  # at least in a block, if rows are small
_MIXED = 64  # blocks at least in a buffer, if rows are large
_THREADS = 4


class Blocks(NamedTuple):
    """Which rows are read together, and how many such blocks a buffer holds."""

    lengths: tuple[int, ...]  # of the parts
    firsts: tuple[int, ...]  # the number of each part's first block, and how many blocks there are
    rows: int  # in a block; the last of a part may be shorter
    held: int

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, memory: int) -> Blocks:
        """Those of parts of so many rows, each of `width` bytes, for two buffers in `memory` bytes.

        >>> Blocks.of([1000, 100], 1024, 2**28)
        Blocks(lengths=(1000, 100), firsts=(0, 4, 5), rows=256, held=512)
        >>> Blocks.of([1000], 2**20, 2**28).rows  # of 1 MiB: 64 together would be too few blocks for a mixture
        2
        """
        width = max(1, width)
        enough = -(-_BYTES // width)
        rows = max(enough, min(_ROWS, memory // 2 // width // _MIXED))
        firsts = starts_of([-(-length // rows) for length in lengths])
        return cls(tuple(lengths), tuple(firsts), rows, max(1, memory // 2 // (rows * width)))

    def run(self, number: int) -> Run:
        """Where a block lies."""
        part = bisect_right(self.firsts, number) - 1
        start = (number - self.firsts[part]) * self.rows
        return Run(part, start, min(start + self.rows, self.lengths[part]))

    def order(self, generator: torch.Generator) -> Tensor:
        """All blocks, mixed."""
        return torch.randperm(self.firsts[-1], generator=generator)

    def shares(self, seed: int, workers: int) -> list[int]:
        """How many rows each of several workers gets."""
        sizes = torch.full((self.firsts[-1],), self.rows)
        for length, end in zip(self.lengths, self.firsts[1:], strict=True):
            if length:
                sizes[end - 1] = (length - 1) % self.rows + 1
        order = self.order(torch.Generator().manual_seed(seed))
        return [int(sizes[order[worker::workers]].sum()) for worker in range(workers)]


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
    columns: Sequence[Sequence[Part]], blocks: Blocks, size: int, seed: int, worker: int = 0, workers: int = 1
) -> Iterator[list[Tensor]]:
    """Batches of the mixed rows of columns, whose parts are of the same lengths; for a worker, its share of them."""
    generator = torch.Generator().manual_seed(seed)
    order = blocks.order(generator)[worker::workers]
    missing, batch = size, []
    for buffers in _filled(columns, blocks, order):
        mixed = torch.randperm(len(buffers[0]), generator=generator)
        while len(mixed):
            drawn, mixed = mixed[:missing], mixed[missing:]
            batch.append([_drawn(buffer, drawn) for buffer in buffers])
            missing -= len(drawn)
            if not missing:
                yield _joined(batch)
                missing, batch = size, []
    if batch:
        yield _joined(batch)


def _filled(columns: Sequence[Sequence[Part]], blocks: Blocks, order: Tensor) -> Iterator[list[Tensor]]:
    """One buffer after the other; while one is used the next is filled."""
    if not len(order):
        return
    numbers = order.split(blocks.held)
    rows = len(numbers[0]) * blocks.rows
    pair = [[torch.empty(rows, *parts[0].shape, dtype=parts[0].dtype) for parts in columns] for _ in numbers[:2]]
    pool = ThreadPoolExecutor(_THREADS)
    try:
        under_way: Filling | None = None
        for chosen, buffers in zip(numbers, cycle(pair), strict=False):
            following = _fill(pool, columns, blocks, chosen, buffers)
            if under_way:
                yield under_way.filled()
            under_way = following
        assert under_way
        yield under_way.filled()
    finally:
        pool.shutdown(cancel_futures=True)


def _fill(
    pool: ThreadPoolExecutor, columns: Sequence[Sequence[Part]], blocks: Blocks, chosen: Tensor, buffers: list[Tensor]
) -> Filling:
    """Begin to read blocks: in the order of the files, since their rows are mixed afterwards."""
    start, reading = 0, []
    for run in map(blocks.run, chosen.sort().values.tolist()):
        stop = start + run.stop - run.start
        for parts, buffer in zip(columns, buffers, strict=True):
            reading.append(pool.submit(parts[run.part].read, buffer[start:stop], run.start))
        start = stop
    return Filling(buffers, start, reading)


def _drawn(buffer: Tensor, rows: Tensor) -> Tensor:
    return as_plain(buffer).index_select(0, rows).view(buffer.dtype)


def _joined(batch: list[list[Tensor]]) -> list[Tensor]:
    return batch[0] if len(batch) == 1 else [torch.cat(pieces) for pieces in zip(*batch, strict=True)]
