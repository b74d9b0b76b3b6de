"""What a harvest will write and how long that takes, from one batch, before it begins."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from torchhook.errors import BudgetError, HarvestError
from torchhook.harvesting.collecting import Collector, Wanted
from torchhook.harvesting.growing import code_of
from torchhook.harvesting.manifest import Kind
from torchhook.harvesting.sources import Read
from torchhook.harvesting.working import harvested
from torchhook.harvesting.writing import Harvested
from torchhook.text import in_units

_SPARE = 64 * 2**20  # of the disk, for headers, journals and others


class Probe(NamedTuple):
    """What one batch gave."""

    sites: dict[str, Kind]
    samples: int
    nbytes: int
    seconds: float
    reads: list[Read]  # what was read for it


def probe(model: nn.Module, wanted: Wanted, reads: Iterator[Read], skips: bool, max_bytes: int) -> Probe:
    """Run the first batch of which something can be harvested."""
    seen: list[Read] = []
    failed: dict[int, str] = {}
    with Collector(model, wanted) as collector:
        for read in reads:
            seen.append(read)
            first = harvested(collector, read, skips)
            if first.pieces:
                start = time.perf_counter()
                again = harvested(collector, read, skips)  # the first time is no measure
                _arrived(again)
                seconds = time.perf_counter() - start
                return _of(again, seconds, seen, max_bytes)
            failed |= first.skipped
        if not seen:
            raise HarvestError("data has no batch")
        sample, reason = next(iter(failed.items()))
        raise HarvestError(f"nothing of data can be harvested; sample {sample}: {reason}")


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


def _arrived(batch: Harvested) -> None:
    """Wait for all of it."""
    for piece in batch.pieces:
        for sent in piece.sites.values():
            sent.values()


def _of(batch: Harvested, seconds: float, reads: list[Read], max_bytes: int) -> Probe:
    if batch.nbytes > max_bytes:
        raise BudgetError(
            f"a batch has {in_units(batch.nbytes)} of rows, more than memory_mb allows ({in_units(max_bytes)}); use"
            " smaller batches or a larger budget"
        )
    kinds = {}
    for name, sent in batch.pieces[0].sites.items():
        code_of(sent.dtype)  # which refuses one that cannot be stored
        kinds[name] = Kind(sent.shape, _name(sent.dtype), _name(sent.given), sent.lengths is not None)
    samples = sum(len(piece.ids) for piece in batch.pieces)
    return Probe(kinds, samples, batch.nbytes, seconds, reads)


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
