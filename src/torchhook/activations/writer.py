"""Writes harvested batches to shards, in a thread of its own with a queue of bounded size.

A commit writes the rows, then the headers, then a line of the journal. A shard that was interrupted resumes from its
last commit.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.activations import store_files
from torchhook.activations.collector import Measurement, SentRows
from torchhook.activations.store_files import (
    Commit,
    Journal,
    Manifest,
    RowFormat,
    SiteCommit,
    merged_moments,
    sync_folder,
)
from torchhook.captures.appendable import PAGE, AppendableTensor, row_bytes
from torchhook.core.errors import BudgetError, HarvestError
from torchhook.core.text import in_units, shape_of


class Amount(NamedTuple):
    """How much was harvested."""

    samples: int = 0  # skipped ones included
    rows: int = 0  # at the site with the most
    nbytes: int = 0

    def plus(self, other: Amount) -> Amount:
        """The sum of two amounts."""
        return Amount(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class Piece:
    """Some samples of a batch with their rows at each site."""

    ids: Sequence[int]
    sites: Mapping[str, SentRows]

    @property
    def amount(self) -> Amount:
        """How much this is."""
        rows = max(len(self.ids) if sent.lengths is None else sum(sent.lengths) for sent in self.sites.values())
        return Amount(len(self.ids), rows, sum(sent.nbytes for sent in self.sites.values()))


@dataclass(frozen=True)
class HarvestedBatch:
    """A batch that went through the model: in one piece, or sample by sample if the whole batch failed."""

    number: int
    pieces: Sequence[Piece]
    skipped: Mapping[int, str]  # id → reason

    @property
    def amount(self) -> Amount:
        """How much this is."""
        return reduce(Amount.plus, (piece.amount for piece in self.pieces), Amount(len(self.skipped)))


class _SiteFiles:
    """The files of one site in a shard."""

    def __init__(
        self,
        out: Path,
        shard: int,
        name: str,
        kind: RowFormat,
        kept: SiteCommit,
        offsets: int,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.name = name
        self.kind = kind
        self.overflow = kept.overflow
        self.moments = kept.state()
        self.values = AppendableTensor(
            store_files.values_path(out, name, shard),
            "values",
            kind.torch_dtype,
            kind.shape,
            pool,
            kept.rows,
            kept.crc32,
        )
        self.offsets: AppendableTensor | None = None
        if kind.ragged:
            path = store_files.offsets_path(out, name, shard)
            self.offsets = AppendableTensor(path, "offsets", torch.int64, (), pool, offsets, kept.offsets_crc32)
            if not offsets:
                self.offsets.append(torch.zeros(1, dtype=torch.int64))

    @property
    def files(self) -> list[AppendableTensor]:
        return [self.values] if self.offsets is None else [self.values, self.offsets]

    def add(self, sent: SentRows, samples: int) -> None:
        self._require_same_format(sent)
        if self.offsets is not None:
            lengths = torch.ones(samples) if sent.lengths is None else torch.tensor(sent.lengths)
            self.offsets.append(self.values.rows + lengths.to(torch.int64).cumsum(0))
        self.values.append(sent.values())
        if sent.measured is not None:
            self._count(sent.measured())

    def kept(self) -> SiteCommit:
        offsets_crc32 = 0 if self.offsets is None else self.offsets.crc32
        moments = SiteCommit.encoded(self.moments)
        return SiteCommit(self.values.rows, self.values.crc32, offsets_crc32, self.overflow, moments)

    def _count(self, measured: Measurement) -> None:
        self.overflow += measured.overflow
        both = [measured.moments] if self.moments is None else [self.moments, measured.moments]
        self.moments = merged_moments(both)

    def _require_same_format(self, sent: SentRows) -> None:
        kind = self.kind
        # with one token per sample, rows of tokens and rows of samples look the same
        if (sent.shape, sent.dtype) != (kind.shape, kind.torch_dtype) or (sent.lengths is not None and not kind.ragged):
            now = _described(sent.shape, sent.dtype, sent.lengths is not None)
            raise HarvestError(
                f"{self.name!r} returned {now}, but {_described(kind.shape, kind.torch_dtype, kind.ragged)} in the"
                " first batch; pass a transform= that makes them alike, or that returns a list with one tensor per"
                " sample if the number of rows varies"
            )


class ShardWriter:
    """Writes one shard, starting after its last commit."""

    def __init__(self, out: Path, manifest: Manifest, shard: int, pool: ThreadPoolExecutor) -> None:
        self.shard = shard
        self._first = shard * manifest.batches_per_shard
        with ExitStack() as opening:
            self._journal = Journal(store_files.journal_path(out, shard))
            opening.callback(self._journal.close)
            last = valid_commit(out, manifest, shard, self._journal.commit)
            self.batches = last.batches
            self.skipped = dict(last.skipped)
            self.input_crc32 = last.input_crc32
            self._samples = AppendableTensor(
                store_files.samples_path(out, shard), "samples", torch.int64, (), pool, last.samples, last.samples_crc32
            )
            opening.callback(self._samples.close)
            self._sites: dict[str, _SiteFiles] = {}
            offsets = last.samples + 1 if last.batches else 0
            for name, kind in manifest.sites.items():
                site = _SiteFiles(out, shard, name, kind, last.sites.get(name, SiteCommit()), offsets, pool)
                self._sites[name] = site
                for file in site.files:
                    opening.callback(file.close)
            for folder in {file.path.parent for file in self._files}:
                sync_folder(folder)
            self._open = opening.pop_all()

    def add(self, harvested: HarvestedBatch) -> None:
        """Append the next batch."""
        if harvested.number != self._first + self.batches:
            raise HarvestError(
                f"batch {harvested.number} does not follow the {self.batches} batches of shard {self.shard}: another"
                " process wrote to it meanwhile; wait for that process, then call harvest again"
            )
        for piece in harvested.pieces:
            self._require_all_sites(piece)
            self._samples.append(_numbers(piece.ids))
            for name, site in self._sites.items():
                site.add(piece.sites[name], len(piece.ids))
        self.skipped.update(harvested.skipped)
        self.batches += 1

    def commit(self, done: bool = False) -> None:
        """Make everything appended so far durable; `input_crc32` must be that of the last batch."""
        for file in self._files:  # before the journal: a shard that is marked as done is not opened again
            file.commit()
            file.flush()
        kept = {name: site.kept() for name, site in self._sites.items()}
        commit = Commit(
            self.batches, self._samples.rows, self._samples.crc32, self.input_crc32, kept, dict(self.skipped), done
        )
        if done:
            self._journal.end(commit)
        else:
            self._journal.write(commit)

    def close(self) -> None:
        """Close all files; rows that were not committed are cut off when the shard is next opened."""
        self._open.close()

    @property
    def _files(self) -> list[AppendableTensor]:
        return [self._samples, *(file for site in self._sites.values() for file in site.files)]

    def _require_all_sites(self, piece: Piece) -> None:
        differ = sorted(set(piece.sites) ^ set(self._sites))
        if differ:
            names = ", ".join(map(repr, differ))
            raise HarvestError(
                f"the calls of some sites differ from the first batch: {names}; harvest only sites that are called"
                " equally often for each batch"
            )


def valid_commit(out: Path, manifest: Manifest, shard: int, commit: Commit | None) -> Commit:
    """A commit, checked against the files: empty if they have fewer rows than it says, not done if they have more."""
    if commit is None:
        return Commit()
    sizes = {store_files.samples_path(out, shard): PAGE + 8 * commit.samples}
    for name, kind in manifest.sites.items():
        kept = commit.sites.get(name, SiteCommit())
        sizes[store_files.values_path(out, name, shard)] = PAGE + kept.rows * row_bytes(kind.torch_dtype, kind.shape)
        if kind.ragged:
            sizes[store_files.offsets_path(out, name, shard)] = PAGE + 8 * (commit.samples + 1)
    found = {path: path.stat().st_size if path.exists() else -1 for path in sizes}
    if any(found[path] < size for path, size in sizes.items()):
        return Commit()
    return commit if found == sizes else replace(commit, done=False)


def _numbers(ids: Sequence[int]) -> Tensor:
    if isinstance(ids, range):  # the usual case
        return torch.arange(ids.start, ids.stop, ids.step)
    return torch.tensor(list(ids), dtype=torch.int64)


def _described(shape: tuple[int, ...], dtype: torch.dtype, ragged: bool) -> str:
    size = shape_of(torch.empty(shape, device="meta"))
    return f"one {size} row in {str(dtype).removeprefix('torch.')} per {'token' if ragged else 'sample'}"


OnWritten = Callable[[Amount], None]
"""Called after each batch with the amount that was written."""

Fingerprint = Callable[[], int]
"""Computes the fingerprint of the data of a batch."""


class WriterThread:
    """Writes batches in the order in which they are put, in a thread of its own.

    `put` waits while more than `max_bytes` are in the queue. An error in the thread is raised by the next `put`, or on
    exit. If the block raises, the batches put so far are still written and committed. A commit needs the fingerprint of
    its last batch, which takes about as long as writing it: those of other batches are not computed.
    """

    def __init__(
        self, out: Path, manifest: Manifest, max_bytes: int, commit_seconds: float, on_written: OnWritten
    ) -> None:
        self._out = out
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._commit_seconds = commit_seconds
        self._on_written = on_written
        self._queue: deque[tuple[HarvestedBatch, int | None] | None] = deque()  # a fingerprint asks for a commit
        self._last: Fingerprint | None = None  # of the last batch; it holds the data, those of all would need memory
        self._committed = time.monotonic()
        self._bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._whole = True
        self._thread = threading.Thread(target=self._run, name="torchhook-harvest", daemon=True)

    def __enter__(self) -> WriterThread:
        self._thread.start()
        return self

    def put(self, harvested: HarvestedBatch, fingerprint: Fingerprint) -> None:
        """Queue a batch, waiting until there is room for it."""
        size = harvested.amount.nbytes
        require_budget(harvested, self._max_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_room(size))
            self._raise()
        input_crc32 = fingerprint() if self._ends_commit(harvested.number) else None
        with self._changed:
            self._last = fingerprint
            self._queue.append((harvested, input_crc32))
            self._bytes += size
            self._changed.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole = kind is None  # otherwise the last shard is resumed another time
        with self._changed:
            self._queue.append(None)
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

    def _ends_commit(self, number: int) -> bool:
        """Whether to commit after this batch: it is the last of its shard, or the last commit was long ago."""
        now = time.monotonic()
        ends = now - self._committed >= self._commit_seconds or not (number + 1) % self._manifest.batches_per_shard
        self._committed = now if ends else self._committed
        return ends

    def _has_room(self, size: int) -> bool:
        """Whether the queue has room for a batch and for the next one, which is being computed meanwhile."""
        return not self._bytes or self._bytes + 2 * size <= self._max_bytes

    def _raise(self) -> None:
        if isinstance(self._error, OSError) and self._error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HarvestError(
                f"the disk of {str(self._out)!r} is full; committed rows are safe: free some space and call harvest"
                " again to resume"
            ) from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with (
                ThreadPoolExecutor(1, "torchhook-checksum") as checksums,
                ThreadPoolExecutor(1, "torchhook-ending") as endings,
            ):
                self._write(checksums, endings)
        except BaseException as error:  # `put` or `__exit__` raises it in the caller's thread
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write(self, checksums: ThreadPoolExecutor, endings: ThreadPoolExecutor) -> None:
        writer: ShardWriter | None = None
        ending: Future[None] | None = None
        try:
            while (queued := self._next()) is not None:
                harvested, input_crc32 = queued
                shard = harvested.number // self._manifest.batches_per_shard
                if writer is None or writer.shard != shard:
                    # one shard is flushed to disk while the next one is written
                    ending, writer = _ended(ending, writer, endings), None
                    writer = ShardWriter(self._out, self._manifest, shard, checksums)
                writer.add(harvested)
                self._release(harvested)
                if input_crc32 is not None:
                    writer.input_crc32 = input_crc32
                    if writer.batches < self._manifest.batches_per_shard:  # a whole one is committed when it ends
                        writer.commit()
            if writer is not None and self._last is not None:
                writer.input_crc32 = self._last()
            if self._whole:
                ending, writer = _ended(ending, writer, endings), None
            elif writer is not None:
                writer.commit()
            if ending is not None:
                ending.result()
        finally:
            if writer is not None:
                writer.close()

    def _next(self) -> tuple[HarvestedBatch, int | None] | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue))
            return self._queue.popleft()

    def _release(self, harvested: HarvestedBatch) -> None:
        """Make room in the queue, and report what was written."""
        with self._changed:
            self._bytes -= harvested.amount.nbytes
            self._changed.notify_all()
        self._on_written(harvested.amount)


def require_budget(harvested: HarvestedBatch, max_bytes: int) -> None:
    """Raise if a single batch is larger than the memory budget."""
    if harvested.amount.nbytes > max_bytes:
        raise BudgetError(
            f"batch {harvested.number} has {in_units(harvested.amount.nbytes)} of rows, more than memory_bytes allows"
            f" ({in_units(max_bytes)}); use smaller batches or a larger memory_bytes"
        )


def _ended(before: Future[None] | None, writer: ShardWriter | None, endings: ThreadPoolExecutor) -> Future[None] | None:
    """Wait for the last commit of the previous shard, then start that of this one in the background."""
    if before is not None:
        before.result()
    return None if writer is None else endings.submit(_end, writer)


def _end(writer: ShardWriter) -> None:
    try:
        writer.commit(done=True)
    finally:
        writer.close()
