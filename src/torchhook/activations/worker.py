"""Batches through the model and into shards: what the local engine does with all, and a Ray actor with a shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from torchhook.activations.collector import Collector, Wanted, single
from torchhook.activations.fingerprints import batch_fingerprint
from torchhook.activations.manifest import Manifest
from torchhook.activations.shard_writer import Harvested, Piece
from torchhook.activations.sources import Read
from torchhook.activations.writer import Conveyor, Tell
from torchhook.core.errors import HarvestError, TorchhookError


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know besides the model and the batches."""

    out: Path
    manifest: Manifest
    wanted: Wanted
    max_bytes: int
    commit_seconds: float

    @property
    def skips(self) -> bool:
        """Whether samples that fail are left out."""
        return self.manifest.on_error == "skip"


def work(job: Job, model: nn.Module, reads: Iterable[Read], tell: Tell) -> None:
    """Harvest batches that follow each other, with the model, the copies to the host and the disk all busy at once."""
    with (
        Collector(model, job.wanted, on_silent="ignore") as collector,
        Conveyor(job.out, job.manifest, job.max_bytes, job.commit_seconds, tell) as conveyor,
    ):
        for read in reads:
            conveyor.put(harvested(collector, read, job.skips))


def harvested(collector: Collector, read: Read, skips: bool) -> Harvested:
    """One batch, run; with `skips` without the samples that the model raises on."""
    ids, skipped, checksum = read.ids, dict(read.unread), batch_fingerprint(read.data)
    if not ids:
        return Harvested(read.number, [], skipped, checksum)
    try:
        return Harvested(read.number, [Piece(ids, collector.collect(read.data, len(ids)))], skipped, checksum)
    except Exception as error:
        if not skips or isinstance(error, torch.AcceleratorError):  # after which a device does nothing more
            raise _told(error, read) from error
    singles = [_alone(collector, read, number) for number in range(len(ids))]
    skipped |= {sample: found for sample, found in zip(ids, singles, strict=True) if isinstance(found, str)}
    return Harvested(read.number, [found for found in singles if isinstance(found, Piece)], skipped, checksum)


def _alone(collector: Collector, read: Read, number: int) -> Piece | str:
    """One sample of a batch, or the reason why it is left out."""
    try:
        return Piece([read.ids[number]], collector.collect(single(read.data, number, len(read.ids)), 1))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _told(error: Exception, read: Read) -> Exception:
    """What the model raised, with the samples that it was given."""
    if isinstance(error, TorchhookError):
        return error
    return HarvestError(
        f"the model raised {type(error).__name__} on batch {read.number}, samples {read.ids[0]} to {read.ids[-1]}:"
        f" {error}; what was harvested before is safe, and on_error='skip' leaves out the samples that it raises on"
    )
