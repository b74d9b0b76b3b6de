"""What a harvest will write and how long that takes, from one batch, before it begins."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from torchhook.activations.collector import Collector, Wanted
from torchhook.activations.sources import ReadBatch
from torchhook.activations.store_files import RowFormat, merged_moments
from torchhook.activations.worker import harvest_batch
from torchhook.activations.writer import HarvestedBatch, require_budget
from torchhook.captures.appendable import code_of
from torchhook.core.errors import HarvestError
from torchhook.core.model_state import buffers_kept
from torchhook.core.text import in_units
from torchhook.core.trees import nbytes
from torchhook.stats.moments import Moments

_SPARE = 64 * 2**20  # of the disk, for headers, journals and others


class Probe(NamedTuple):
    """What one batch gave."""

    sites: dict[str, RowFormat]
    seen: dict[str, tuple[float, float]]  # mean and deviation at each site
    samples: int
    batch_size: int  # with those that were skipped
    nbytes: int
    input_bytes: int
    seconds: float  # of the model, and of reading the next batch
    reads: list[ReadBatch]  # what was read for it


def probe(model: nn.Module, wanted: Wanted, reads: Iterator[ReadBatch], skips: bool, max_bytes: int) -> Probe:
    """Run the first batch of which something can be harvested."""
    seen: list[ReadBatch] = []
    failed: dict[int, str] = {}
    with buffers_kept(model), Collector(model, wanted) as collector:
        for read in reads:
            seen.append(read)
            first = harvest_batch(collector, read, skips)
            if first.pieces:
                start = time.perf_counter()
                again = harvest_batch(collector, read, skips)  # the first time is no measure
                _arrived(again)
                following = next(reads, None)
                seconds = time.perf_counter() - start
                return _of(again, read, seconds, seen if following is None else [*seen, following], max_bytes)
            failed |= first.skipped
        for sample, reason in failed.items():
            raise HarvestError(f"nothing of data can be harvested; sample {sample}: {reason}")
        raise HarvestError("data has no sample")


class Estimate(NamedTuple):
    """What is to come; None where the data do not say how many samples they have."""

    samples: int | None
    nbytes: int | None
    seconds: float | None
    free: int
    probe: Probe

    def __str__(self) -> str:
        each = f"{in_units(self.probe.nbytes)} and {_time(self.probe.seconds)} a batch of {self.probe.samples}"
        if self.nbytes is None or self.seconds is None:
            return f"{each}; the data do not say how many there are; {in_units(self.free)} are free"
        if not self.samples:
            return "all of it is there"
        return (
            f"{self.samples:,} samples to go: {in_units(self.nbytes)} in about {_time(self.seconds)} ({each});"
            f" {in_units(self.free)} are free"
        )


def estimate(found: Probe, left: int | None, out: Path, workers: int) -> Estimate:
    """What `left` samples take, shared by so many workers; refuses what the disk cannot hold."""
    free = free_disk(out)
    if left is None:
        return Estimate(None, None, None, free, found)
    nbytes = int(left / found.samples * found.nbytes)
    if nbytes + _SPARE > free:
        raise HarvestError(
            f"the disk of {str(out)!r} cannot hold it: {in_units(nbytes)} are to come, by the first batch, and"
            f" {in_units(free)} are free; make room, or take fewer sites, a smaller dtype or a transform= to keep less"
        )
    return Estimate(left, nbytes, left / found.samples * found.seconds / workers, free, found)


def free_disk(out: Path) -> int:
    """The bytes that are free where `out` is or will be."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(there).free


def _arrived(batch: HarvestedBatch) -> None:
    """Wait for all of it."""
    for piece in batch.pieces:
        for sent in piece.sites.values():
            sent.values()


def _of(batch: HarvestedBatch, read: ReadBatch, seconds: float, reads: list[ReadBatch], max_bytes: int) -> Probe:
    require_budget(batch, max_bytes)
    kinds = {}
    for name, sent in batch.pieces[0].sites.items():
        code_of(sent.dtype)  # which refuses one that cannot be stored
        kinds[name] = RowFormat(sent.shape, _name(sent.dtype), _name(sent.given), sent.lengths is not None)
    samples = sum(len(piece.ids) for piece in batch.pieces)
    size = len(read.ids) + len(read.unread)
    return Probe(kinds, _seen(batch), samples, size, batch.amount.nbytes, nbytes(read.data), seconds, reads)


def _seen(batch: HarvestedBatch) -> dict[str, tuple[float, float]]:
    """Mean and deviation of the real numbers at each site."""
    seen = {}
    for name in batch.pieces[0].sites:
        measured = [sent.measured() for piece in batch.pieces if (sent := piece.sites[name]).measured is not None]
        total = merged_moments([one.moments for one in measured])
        if total is not None:
            told = Moments().compute(total)
            seen[name] = (told.mean, told.std)
    return seen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _time(seconds: float) -> str:
    """A time as people say it.

    >>> _time(0.25), _time(90), _time(7300)
    ('250 ms', '1 min 30 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
