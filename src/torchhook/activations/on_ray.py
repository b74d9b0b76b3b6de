"""The shards of a harvest, shared out among Ray actors that each hold the model.

Ray decides where actors live, starts them again when they die, and repeats what they were at; a shard that is repeated
goes on from its last commit. The folder must be one that all of them see.
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

from torchhook.activations.harvest import Meter
from torchhook.activations.sources import ReadBatch, Source
from torchhook.activations.worker import Job, gap_of, gaps, joined_gaps, read_gap, work
from torchhook.activations.writer import Amount
from torchhook.core.errors import HarvestError
from torchhook.core.selection import Query, queries_of

_REPEATS = 3  # how often the death of an actor is forgiven to one shard


class ActorResources(NamedTuple):
    """How many actors there are, and what each takes of its machine."""

    workers: int
    cpus: float
    gpus: float

    @staticmethod
    def of(resources: dict[str, float], workers: int | None) -> ActorResources:
        """A GPU an actor where there are enough; of the CPUs one is left over, for whoever reads the data.

        >>> ActorResources.of({"CPU": 2.0}, 2)
        ActorResources(workers=2, cpus=0.5, gpus=0.0)
        """
        cpus, gpus = resources.get("CPU", 1.0), resources.get("GPU", 0.0)
        workers = workers or int(gpus) or max(1, int(cpus) - 1)
        return ActorResources(workers, min(1.0, max(cpus - 1, 0.1) / workers), min(1.0, gpus / workers))


class ShardTask(NamedTuple):
    """A shard to make: read from a source by whoever makes it, or from batches that were read already."""

    shard: int
    stop: int | None  # how many batches there are in all, if that is known
    source: Any  # a reference to a Source, or None
    batches: list[Any]  # references to what was read


class ShardWorker:
    """Holds a copy of the model and makes one shard after the other."""

    def __init__(self, shared: list[Any], workers_here: int) -> None:
        """`shared` refers to the job and the model, which the driver holds for actors that start again."""
        import ray

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers_here))
        self.job, model = ray.get(shared)
        self.model = model.to("cuda") if ray.get_gpu_ids() else model

    def make(self, task: ShardTask) -> Amount:
        """Make what is missing of a shard; how much that was."""
        import ray

        gap = gap_of(self.job.out, self.job.manifest, task.shard, task.stop)
        if gap is None:  # an actor that died after its last commit made it
            return Amount()
        if task.source is not None:
            reads = read_gap(ray.get(task.source), gap, self.job.skips)
        else:
            fetched: Iterator[Any] = map(ray.get, task.batches)
            reads = (one for one in fetched if one.number >= gap.start)
        made: list[Amount] = []
        work(self.job, self.model, reads, made.append)
        return reduce(Amount.plus, made, Amount())


def fill(
    job: Job, model: nn.Module, source: Source, ahead: Iterator[ReadBatch] | None, workers: int | None, meter: Meter
) -> None:
    """Make what is missing, by Ray; `ahead` are all batches, if nothing is there yet."""
    ray = _ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    share = ActorResources.of(ray.cluster_resources(), workers)
    here = -(-share.workers // max(1, len(ray.nodes())))
    job = replace(job, wanted=replace(job.wanted, sites=_portable(job.wanted.sites, model)))
    actor = ray.remote(ShardWorker).options(
        num_cpus=share.cpus, num_gpus=share.gpus, max_restarts=-1, max_task_retries=_REPEATS
    )
    shared = [ray.put(job), ray.put(model)]
    actors = [actor.remote(shared, here) for _ in range(share.workers)]
    try:
        _share_out(ray, actors, _tasks(ray, job, source, ahead), meter)
    finally:
        for one in actors:
            ray.kill(one)


def _share_out(ray: Any, actors: list[Any], tasks: Iterator[ShardTask], meter: Meter) -> None:
    """Give every actor one task after the other, and the next one while it is still busy."""
    busy: dict[Any, Any] = {}  # what comes of a task → the actor that is at it
    free = [*actors, *actors]
    for task in tasks:
        if not free:
            free += _ended(ray, busy, meter)
        one = free.pop(0)
        busy[one.make.remote(task)] = one
    while busy:
        _ended(ray, busy, meter)


def _ended(ray: Any, busy: dict[Any, Any], meter: Meter) -> list[Any]:
    """Wait for a task to end, and say which actors have room again."""
    ended, _ = ray.wait(list(busy), num_returns=1)
    try:
        for made in ray.get(ended):
            meter.add(made)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise HarvestError(
            f"an actor of Ray died {_REPEATS + 1} times at the same shard: {error}; what was committed is safe, and"
            " calling harvest again goes on from there"
        ) from error
    return [busy.pop(one) for one in ended]


def _tasks(ray: Any, job: Job, source: Source, ahead: Iterator[ReadBatch] | None) -> Iterator[ShardTask]:
    """The shards that are missing: to be read by the actors where any batch can be read by itself, else here."""
    missing, per = gaps(job.out, job.manifest, source.batches), job.manifest.batches_per_shard
    if source.indexed:
        reference = ray.put(source)
        yield from (ShardTask(gap.start // per, source.batches, reference, []) for gap in missing)
        return
    reads = ahead or chain.from_iterable(read_gap(source, gap, job.skips) for gap in joined_gaps(missing))
    for shard, batches in groupby(reads, lambda one: one.number // per):
        yield ShardTask(shard, source.batches, None, [ray.put(one) for one in batches])


def _portable(sites: Any, model: nn.Module) -> list[Query]:
    """Queries that mean the same in another process, where a module is another one."""
    paths = {module: path for path, module in model.named_modules(remove_duplicate=False)}
    return [paths.get(query, query) if isinstance(query, nn.Module) else query for query in queries_of(sites)]


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ImportError("engine='ray' needs Ray: pip install 'torchhook[ray]'") from error
    return ray
