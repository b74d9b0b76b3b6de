"""Distributes the shards of a harvest over Ray actors, each with a copy of the model.

Ray places the actors, restarts one that dies, and repeats its shard, which resumes from its last commit. All actors
must see the folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook.activations.sources import ReadBatch, Source
from torchhook.activations.worker import Job, gap_of, gaps, joined_gaps, read_gap, work
from torchhook.activations.writer import Amount, OnWritten
from torchhook.core.errors import HarvestError
from torchhook.core.optional import require
from torchhook.core.selection import Query, queries_of

_RETRIES = 3  # of a shard whose actor died


class ActorResources(NamedTuple):
    """The number of actors, and the resources of each."""

    workers: int
    cpus: float
    gpus: float

    @staticmethod
    def of(resources: dict[str, float], workers: int | None) -> ActorResources:
        """One GPU per actor if there are enough; one CPU is left for reading the data.

        >>> ActorResources.of({"CPU": 2.0}, 2)
        ActorResources(workers=2, cpus=0.5, gpus=0.0)
        """
        cpus, gpus = resources.get("CPU", 1.0), resources.get("GPU", 0.0)
        workers = workers or int(gpus) or max(1, int(cpus) - 1)
        return ActorResources(workers, min(1.0, max(cpus - 1, 0.1) / workers), min(1.0, gpus / workers))


class ShardTask(NamedTuple):
    """A shard to harvest: the actor reads its batches from the source, or gets them from the driver."""

    shard: int
    stop: int | None  # the number of all batches, if known
    source: Any  # a reference to a Source, or None
    batches: list[Any]  # references to batches that the driver read


class ShardWorker:
    """An actor: holds a copy of the model and harvests one shard after the other."""

    def __init__(self, shared: list[Any], workers_here: int) -> None:
        """`shared` has references to the job and the model, which the driver keeps for actors that are restarted."""
        import ray

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers_here))
        self.job, model = ray.get(shared)
        self.model = model.to("cuda") if ray.get_gpu_ids() else model

    def make(self, task: ShardTask) -> Amount:
        """Harvest the missing batches of a shard; returns how much was written."""
        import ray

        gap = gap_of(self.job.out, self.job.manifest, task.shard, task.stop)
        if gap is None:  # an actor finished it, and died before it could say so
            return Amount()
        if task.source is not None:
            reads = read_gap(ray.get(task.source), gap, self.job.skips)
        else:
            fetched: Iterator[Any] = map(ray.get, task.batches)
            reads = (one for one in fetched if one.number >= gap.start)
        written: list[Amount] = []
        work(self.job, self.model, reads, written.append)
        return reduce(Amount.plus, written, Amount())


def fill(
    job: Job,
    model: nn.Module,
    source: Source,
    ahead: Iterator[ReadBatch] | None,
    workers: int | None,
    on_written: OnWritten,
) -> None:
    """Harvest all missing batches with Ray; `ahead` has all batches if the store is still empty."""
    require("ray.exceptions", "ray", "engine='ray'")
    ray = require("ray", "ray", "engine='ray'")
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    resources = ActorResources.of(ray.cluster_resources(), workers)
    workers_here = -(-resources.workers // max(1, len(ray.nodes())))
    job = replace(job, wanted=replace(job.wanted, sites=_portable(job.wanted.sites, model)))
    actor = ray.remote(ShardWorker).options(
        num_cpus=resources.cpus, num_gpus=resources.gpus, max_restarts=-1, max_task_retries=_RETRIES
    )
    shared = [ray.put(job), ray.put(model)]
    actors = [actor.remote(shared, workers_here) for _ in range(resources.workers)]
    try:
        _distribute(ray, actors, _tasks(ray, job, source, ahead), on_written)
    finally:
        for one in actors:
            ray.kill(one)


def _distribute(ray: Any, actors: list[Any], tasks: Iterator[ShardTask], on_written: OnWritten) -> None:
    """Give each actor one task after the other, the next one while it is still busy."""
    busy: dict[Any, Any] = {}  # reference to the result of a task → its actor
    free = [*actors, *actors]
    for task in tasks:
        if not free:
            free += _wait_for_one(ray, busy, on_written)
        one = free.pop(0)
        busy[one.make.remote(task)] = one
    while busy:
        _wait_for_one(ray, busy, on_written)


def _wait_for_one(ray: Any, busy: dict[Any, Any], on_written: OnWritten) -> list[Any]:
    """Wait until a task ends; returns the actor that is free again."""
    ended, _ = ray.wait(list(busy), num_returns=1)
    try:
        for written in ray.get(ended):
            on_written(written)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise HarvestError(
            f"a Ray actor died {_RETRIES + 1} times on the same shard: {error}; committed rows are safe: call harvest"
            " again to resume"
        ) from error
    return [busy.pop(one) for one in ended]


def _tasks(ray: Any, job: Job, source: Source, ahead: Iterator[ReadBatch] | None) -> Iterator[ShardTask]:
    """The missing shards: actors read the batches where each can be read by its number, otherwise the driver does."""
    missing, per = gaps(job.out, job.manifest, source.batches), job.manifest.batches_per_shard
    if source.indexed:
        reference = ray.put(source)
        yield from (ShardTask(gap.start // per, source.batches, reference, []) for gap in missing)
        return
    reads = ahead or chain.from_iterable(read_gap(source, gap, job.skips) for gap in joined_gaps(missing))
    for shard, batches in groupby(reads, lambda one: one.number // per):
        yield ShardTask(shard, source.batches, None, [ray.put(one) for one in batches])


def _portable(sites: Any, model: nn.Module) -> list[Query]:
    """The queries with modules replaced by their paths, since another process has other module objects."""
    paths = {module: path for path, module in model.named_modules(remove_duplicate=False)}
    return [paths.get(query, query) if isinstance(query, nn.Module) else query for query in queries_of(sites)]
