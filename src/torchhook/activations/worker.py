"""Finds the batches that a store lacks, and harvests them; both engines use it, locally or in each Ray actor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from torchhook.activations import store_files
from torchhook.activations.collate import error_text
from torchhook.activations.collector import Collector, Wanted, single
from torchhook.activations.fingerprints import batch_fingerprint
from torchhook.activations.sources import ReadBatch, Source
from torchhook.activations.store_files import Commit, Manifest, last_commit
from torchhook.activations.writer import HarvestedBatch, OnWritten, Piece, ShardWriter, WriterThread, valid_commit
from torchhook.core.errors import HarvestError, TorchhookError


@dataclass(frozen=True)
class Job:
    """What a worker needs besides the model and the batches."""

    out: Path
    manifest: Manifest
    wanted: Wanted
    max_bytes: int
    commit_seconds: float

    @property
    def skips(self) -> bool:
        """Whether samples that fail are skipped."""
        return self.manifest.on_error == "skip"


def work(job: Job, model: nn.Module, reads: Iterable[ReadBatch], on_written: OnWritten) -> None:
    """Harvest consecutive batches; the model, the copies to the host and the disk work at the same time."""
    with (
        Collector(model, job.wanted, on_silent="ignore") as collector,
        WriterThread(job.out, job.manifest, job.max_bytes, job.commit_seconds, on_written) as writer,
    ):
        for read in reads:
            writer.put(harvest_batch(collector, read, job.skips), partial(batch_fingerprint, read.data))


def harvest_batch(collector: Collector, read: ReadBatch, skips: bool) -> HarvestedBatch:
    """Run one batch; with `skips`, leave out the samples on which the model raises."""
    ids, skipped = read.ids, dict(read.unread)
    if not ids:
        return HarvestedBatch(read.number, [], skipped)
    try:
        return HarvestedBatch(read.number, [Piece(ids, collector.collect(read.data, len(ids)))], skipped)
    except Exception as error:
        if not skips or isinstance(error, torch.AcceleratorError):  # the device is unusable after that
            raise _with_samples(error, read) from error
    singles = [_single_piece(collector, read, number) for number in range(len(ids))]
    skipped |= {sample: found for sample, found in zip(ids, singles, strict=True) if isinstance(found, str)}
    return HarvestedBatch(read.number, [found for found in singles if isinstance(found, Piece)], skipped)


def _single_piece(collector: Collector, read: ReadBatch, number: int) -> Piece | str:
    """Run one sample of a batch; the reason if it fails."""
    try:
        return Piece([read.ids[number]], collector.collect(single(read.data, number, len(read.ids)), 1))
    except Exception as error:
        return error_text(error).splitlines()[0]


def _with_samples(error: Exception, read: ReadBatch) -> Exception:
    """An error of the model, with the samples that caused it."""
    if isinstance(error, TorchhookError):
        return error
    return HarvestError(
        f"the model raised {type(error).__name__} on batch {read.number}, samples {read.ids[0]} to {read.ids[-1]}:"
        f" {error}; batches before it are safe; pass on_error='skip' to leave out the samples that fail"
    )


class Gap(NamedTuple):
    """Consecutive batches that a store lacks."""

    start: int
    stop: int | None  # None: to the end of the data
    checksum: int | None = None  # of the batch before, if it is in the same shard: it must not have changed


def gaps(out: Path, manifest: Manifest, batches: int | None) -> list[Gap]:
    """The gaps in `out`, shard by shard, for data with this many batches; None if their number is unknown."""
    per = manifest.batches_per_shard
    known = -(-batches // per) if batches is not None else manifest.shards
    shards = max(store_files.shard_numbers(out), default=-1) + 1 if known is None else known
    found = [gap for shard in range(shards) if (gap := gap_of(out, manifest, shard, batches)) is not None]
    if known is None:
        before = commit_of(out, manifest, shards - 1) if shards else Commit()
        found.append(Gap(shards * per, None, before.input_crc32 if before.batches == per else None))
    return found


def gap_of(out: Path, manifest: Manifest, shard: int, batches: int | None) -> Gap | None:
    """The gap in one shard, if there is one."""
    per = manifest.batches_per_shard
    commit = commit_of(out, manifest, shard)
    start, stop = shard * per + commit.batches, (shard + 1) * per
    stop = stop if batches is None else min(stop, batches)
    if commit.done or start >= stop:
        return None
    return Gap(start, stop, commit.input_crc32 if commit.batches else None)


def joined_gaps(found: list[Gap]) -> list[Gap]:
    """Adjacent gaps merged into one, so that they are read in one go.

    >>> joined_gaps([Gap(3, 8, 17), Gap(8, 16), Gap(24, None)])
    [Gap(start=3, stop=16, checksum=17), Gap(start=24, stop=None, checksum=None)]
    """
    longer: list[Gap] = []
    for gap in found:
        if longer and longer[-1].stop == gap.start and gap.checksum is None:
            longer[-1] = longer[-1]._replace(stop=gap.stop)
        else:
            longer.append(gap)
    return longer


def commit_of(out: Path, manifest: Manifest, shard: int) -> Commit:
    """The last commit of a shard, as far as its files have it."""
    return valid_commit(out, manifest, shard, last_commit(store_files.journal_path(out, shard)))


def read_gap(source: Source, gap: Gap, skips: bool) -> Iterator[ReadBatch]:
    """The batches of a gap; raises a `HarvestError` if the batch before it changed."""
    start = number = gap.start if gap.checksum is None else gap.start - 1
    for number, one in enumerate(source.read(start, gap.stop, skip=skips), start + 1):  # noqa: B007 (for the end)
        if one.number >= gap.start:
            yield one
        elif batch_fingerprint(one.data) != gap.checksum:
            raise HarvestError(
                f"the data changed: batch {one.number} differs from when it was harvested; pass the same data, or"
                " another folder as out"
            )
    if number < gap.start:
        raise HarvestError(
            f"the data changed: they now end before batch {gap.start - 1}, which was harvested; pass the same data,"
            " or another folder as out"
        )


def finish(out: Path, manifest: Manifest, batches: int | None) -> None:
    """Mark each shard and the store as complete; raises a `HarvestError` if batches are missing."""
    shards = store_files.shard_numbers(out)
    missing = [] if batches is None else gaps(out, manifest, batches)
    if missing or shards != list(range(len(shards))) or not shards:
        raise HarvestError(
            f"batches from {missing[0].start if missing else 0} on are missing in {str(out)!r}; pass a folder that all"
            " workers can see"
        )
    with ThreadPoolExecutor(1) as pool:
        for shard in shards:
            if not commit_of(out, manifest, shard).done:
                writer = ShardWriter(out, manifest, shard, pool)
                try:
                    writer.commit(done=True)
                finally:
                    writer.close()
    manifest.done(len(shards)).write(out)
