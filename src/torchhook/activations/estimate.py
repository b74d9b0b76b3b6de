"""How much a harvest will write and how long it will take, predicted from one batch."""

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

_SPARE = 64 * 2**20  # bytes of the disk that a harvest leaves for headers, journals and other programs


class Probe(NamedTuple):
    """What the first batch shows about the harvest."""

    sites: dict[str, RowFormat]
    seen: dict[str, tuple[float, float]]  # mean and standard deviation at each site
    samples: int
    batch_size: int  # skipped samples included
    nbytes: int
    input_bytes: int
    seconds: float  # to run the model and read the next batch
    reads: list[ReadBatch]  # every batch read so far


def probe(model: nn.Module, wanted: Wanted, reads: Iterator[ReadBatch], skips: bool, max_bytes: int) -> Probe:
    """Run the first batch that has a sample the model can be run on."""
    seen: list[ReadBatch] = []
    failed: dict[int, str] = {}
    with buffers_kept(model), Collector(model, wanted) as collector:
        for read in reads:
            seen.append(read)
            first = harvest_batch(collector, read, skips)
            if first.pieces:
                start = time.perf_counter()
                again = harvest_batch(collector, read, skips)  # the first run pays for warming up
                _wait_for(again)
                following = next(reads, None)
                seconds = time.perf_counter() - start
                return _probe_of(again, read, seconds, seen if following is None else [*seen, following], max_bytes)
            failed |= first.skipped
        for sample, reason in failed.items():
            raise HarvestError(f"every sample of data fails; sample {sample}: {reason}")
        raise HarvestError("data has no samples")


class Estimate(NamedTuple):
    """What is left to harvest; None where the number of samples is unknown."""

    samples: int | None
    nbytes: int | None
    seconds: float | None
    free: int
    probe: Probe

    def __str__(self) -> str:
        each = f"{in_units(self.probe.nbytes)} and {_time(self.probe.seconds)} per batch of {self.probe.samples}"
        if self.nbytes is None or self.seconds is None:
            return f"{each}; number of samples unknown; {_disk(self.free)}"
        if not self.samples:
            return "already complete"
        return (
            f"{self.samples:,} samples to go: {in_units(self.nbytes)} in about {_time(self.seconds)} ({each});"
            f" {_disk(self.free)}"
        )


def estimate(found: Probe, left: int | None, out: Path, workers: int) -> Estimate:
    """The estimate for `left` samples and this many workers; raises if the disk cannot hold them."""
    free = free_disk(out)
    if left is None:
        return Estimate(None, None, None, free, found)
    nbytes = int(left / found.samples * found.nbytes)
    if nbytes + _SPARE > free:
        raise HarvestError(
            f"not enough disk space for {str(out)!r}: about {in_units(nbytes)} to write, judging by the first batch,"
            f" but {_disk(free)}; free some space, or pass fewer sites, a smaller dtype, or a transform= that keeps"
            " less"
        )
    return Estimate(left, nbytes, left / found.samples * found.seconds / workers, free, found)


def free_disk(out: Path) -> int:
    """Free bytes on the disk where `out` is or will be."""
    existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


def _disk(free: int) -> str:
    return f"{in_units(free)} free on disk, {in_units(_SPARE)} of them in reserve"


def _wait_for(batch: HarvestedBatch) -> None:
    """Wait until all rows of the batch are on the host."""
    for piece in batch.pieces:
        for sent in piece.sites.values():
            sent.values()


def _probe_of(batch: HarvestedBatch, read: ReadBatch, seconds: float, reads: list[ReadBatch], max_bytes: int) -> Probe:
    require_budget(batch, max_bytes)
    kinds = {}
    for name, sent in batch.pieces[0].sites.items():
        code_of(sent.dtype)  # raises if safetensors cannot store it
        kinds[name] = RowFormat(sent.shape, _name(sent.dtype), _name(sent.given), sent.lengths is not None)
    samples = sum(len(piece.ids) for piece in batch.pieces)
    size = len(read.ids) + len(read.unread)
    return Probe(kinds, _mean_and_std(batch), samples, size, batch.amount.nbytes, nbytes(read.data), seconds, reads)


def _mean_and_std(batch: HarvestedBatch) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation at each site with floating-point values."""
    found = {}
    for name in batch.pieces[0].sites:
        measured = [sent.measured() for piece in batch.pieces if (sent := piece.sites[name]).measured is not None]
        total = merged_moments([one.moments for one in measured])
        if total is not None:
            summary = Moments().compute(total)
            found[name] = (summary.mean, summary.std)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _time(seconds: float) -> str:
    """A duration in readable units.

    >>> _time(0.25), _time(90), _time(7300)
    ('250 ms', '1 min 30 s', '2 h 1 min')
    """
    if seconds < 10:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
