"""Trainings on several ranks, one after the other in the same processes: ``torchrun program.py FOLDER CASE [CASE …]``.

All numbers are small multiples of powers of two, so that sums are exact in any order, and what all ranks see together
can be compared to the last bit with what one process sees.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchhook import Monitor

BATCH = 16
STEPS = 3


def exact(model: nn.Module) -> nn.Module:
    """The model with weights that are multiples of a quarter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator) / 4)
    return model


def net() -> nn.Module:
    return exact(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double())


def batch(step: int) -> torch.Tensor:
    return torch.randint(-2, 3, (BATCH, 8), generator=torch.Generator().manual_seed(100 + step)).double()


def own(x: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    return x.chunk(world)[rank]


def train(
    model,
    folder,
    *,
    parts=(0, 1),
    wrapped=None,
    mesh=None,
    steps=STEPS,
    fault=None,
    optimizer=None,
    data=batch,
    name="net",
):
    """Train `model` and watch it, on the part of each batch that `parts` says."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=2**-6)
    call = wrapped or model
    with Monitor(model, optimizer, every=1, to=folder, price=None, name=name, mesh=mesh) as monitor:
        for step in range(steps):
            optimizer.zero_grad()
            x = own(data(step), *parts)
            if fault is not None:
                changed = fault("input", step, x, model)
                x = x if changed is None else changed
            loss = call(x).square().mean()
            loss.backward()
            if fault is not None:
                fault("backward", step, x, model)
            optimizer.step()
            if fault is not None:
                fault("step", step, x, model)
            monitor.step(loss=loss)
    return monitor


def one(folder: Path) -> None:
    """The same in one process, with all the data."""
    train(net(), folder)


def ddp(folder, rank, world, fault=None, steps=STEPS, make=net, rate=2**-6, **more):
    model = nn.parallel.DistributedDataParallel(make(), **more)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    return train(
        model.module, folder, parts=(rank, world), wrapped=model, fault=fault, steps=steps, optimizer=optimizer
    )


def fsdp(folder, rank, world, fault=None, steps=STEPS):
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (world,)))
    return train(model, folder, parts=(rank, world), fault=fault, steps=steps)


def tp(folder, rank, world, fault=None, steps=STEPS):
    model = tensor_parallel(net(), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    return train(model, folder, fault=fault, steps=steps)


def ddp_tp(folder, rank, world, fault=None):
    """Two replicas, each of two shards."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(tensor_parallel(net(), mesh["tp"]), mesh=mesh["dp"])
    return train(model, folder, parts=(mesh["dp"].get_local_rank(), 2), fault=fault)


def pp(folder, rank, world, fault=None):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    whole = net()
    model = whole[:2] if rank == 0 else nn.Sequential(*whole[2:])
    if rank == 1:  # keep the names of the whole
        model = nn.Sequential()
        model.add_module("2", whole[2])
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: y.square().mean())
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    with Monitor(model, optimizer, every=1, to=folder, price=None, name="net") as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(batch(step))
                loss = None
            else:
                losses = []
                schedule.step(target=torch.zeros(BATCH, 4, dtype=torch.float64), losses=losses)
                loss = torch.stack(losses).mean()
            optimizer.step()
            monitor.step(loss=loss)


def tensor_parallel(model, mesh):
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def normed():
    return exact(nn.Sequential(*net(), nn.LayerNorm(4).double()))


def one_normed(folder: Path) -> None:
    train(normed(), folder)


def fsdp_tp_normed(folder, rank, world, fault=None, steps=STEPS):
    """A norm that is not in the tensor-parallel plan."""
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = fully_shard(tensor_parallel(normed(), mesh["tp"]), mesh=mesh["dp"])
    return train(model, folder, parts=(mesh["dp"].get_local_rank(), 2), fault=fault, steps=steps)


def ddp_tp_normed(folder, rank, world, fault=None, steps=STEPS):
    """DistributedDataParallel around shards that torch has made plain tensors."""
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(normed(), mesh["tp"])
    _pre_dp_module_transform(model)
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    return train(model, folder, parts=(mesh["dp"].get_local_rank(), 2), wrapped=wrapped, fault=fault, steps=steps)


# --- faults, each with the code, the rank and the site at which it has to be found


def bypassed(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    train(model.module, folder, parts=(rank, world), wrapped=None, steps=4)


def drifted(folder, rank, world, at=2):
    def fault(when, step, x, model):
        if when == "step" and step == at and rank == 1:
            with torch.no_grad():
                model[2].weight[0, 0] += 2**-8

    ddp(folder, rank, world, fault, steps=at + 4)


def drifted_late(folder, rank, world):
    """When checksums are no longer taken in every measured step."""
    drifted(folder, rank, world, at=7)


def norm_drifted(folder, rank, world):
    """On one of the tensor-parallel ranks that share a shard of a norm which is not in their plan."""

    def fault(when, step, x, model):
        if when == "step" and step == 2 and rank == 3:
            with torch.no_grad():
                model[3].weight.to_local()[0] += 2**-8

    fsdp_tp_normed(folder, rank, world, fault, steps=6)


def state_drifted(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.module.parameters(), lr=1e-9)

    def fault(when, step, x, model):
        if when == "step" and step == 2 and rank == 1:
            optimizer.state[model[0].bias]["exp_avg_sq"][0] *= 1.5

    train(model.module, folder, parts=(rank, world), wrapped=model, optimizer=optimizer, fault=fault, steps=4)


def buffer_wrong(folder, rank, world):
    def make():
        model = net()
        model[1].register_buffer("table", torch.arange(4.0))
        return model

    def fault(when, step, x, model):
        if when == "step" and step == 1 and rank == 1:
            model[1].table[2] = 7

    ddp(folder, rank, world, fault, steps=6, make=make, broadcast_buffers=False)


def unaveraged(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    with model.no_sync():
        train(model.module, folder, parts=(rank, world), wrapped=model, steps=4)


def clipped_apart(folder, rank, world):
    """Tensor-parallel ranks that clip by the norm of their own shards, as BLOOM's did."""
    model = tensor_parallel(net(), init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))

    def fault(when, step, x, model):
        if when == "backward":
            grads = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads]))
            for grad in grads:
                grad.mul_(1 / norm)

    train(model, folder, fault=fault, steps=4)


def scaled(folder, rank, world):
    def fault(when, step, x, model):
        return x * 64 if when == "input" and step >= 4 and rank == 1 else None

    ddp(folder, rank, world, fault, steps=8, rate=2**-20)


def same_batch(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    train(model.module, folder, parts=(0, world), wrapped=model, steps=4)


def trained_on_one(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    parameters = [p for name, p in model.module.named_parameters() if rank == 0 or name != "2.bias"]
    train(
        model.module, folder, parts=(rank, world), wrapped=model, optimizer=torch.optim.SGD(parameters, 2**-6), steps=5
    )


def nan(folder, rank, world):
    def fault(when, step, x, model):
        if when == "input" and step == 3 and rank == 1:
            return x.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(float("nan"), dtype=x.dtype))
        return None

    ddp(folder, rank, world, fault, steps=6)


def left_early(folder, rank, world):
    """Rank 1 has half the batches. Steps take less than it takes the ranks to find one another."""
    train(net(), folder, parts=(rank, world), steps=20 if rank == 1 else 40)


def slow(folder, rank, world):
    import time

    def fault(when, step, x, model):
        if when == "input" and rank == 1:
            time.sleep(0.15)

    ddp(folder, rank, world, fault, steps=14)


# --- healthy trainings that look unusual


def with_dropout(folder, rank, world):
    torch.manual_seed(rank)
    ddp(folder, rank, world, steps=12, make=lambda: nn.Sequential(*net()[:2], nn.Dropout(0.3), net()[2]))


def with_uneven_batches(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    train(
        model.module,
        folder,
        wrapped=model,
        steps=12,
        data=lambda step: own(batch(step), rank, world)[: 8 if step % 4 else 3 + rank],
    )


def with_join(folder, rank, world):
    """Rank 1 has half the batches, and join() is there for that."""
    model = nn.parallel.DistributedDataParallel(net())
    with model.join():
        train(model.module, folder, parts=(rank, world), wrapped=model, steps=20 if rank == 1 else 40)


def stale_optimizer(folder, rank, world):
    """The optimizer has the parameters from before fully_shard, which are no longer those of the model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    model = fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    train(model, folder, parts=(rank, world), optimizer=optimizer, steps=12)


def with_frozen_parts(folder, rank, world):
    def make():
        model = net()
        model[0].requires_grad_(False)
        return model

    ddp(folder, rank, world, steps=12, make=make)


def with_batch_norm(folder, rank, world):
    ddp(folder, rank, world, steps=12, make=lambda: nn.Sequential(net()[0], nn.BatchNorm1d(16).double(), *net()[1:]))


def with_accumulation(folder, rank, world):
    model = nn.parallel.DistributedDataParallel(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with Monitor(model.module, optimizer, every=1, to=folder, price=None, name="net") as monitor:
        for step in range(12):
            optimizer.zero_grad()
            for part in range(4):
                with contextlib.nullcontext() if part == 3 else model.no_sync():
                    loss = model(own(batch(4 * step + part), rank, world)).square().mean() / 4
                    loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            monitor.step(loss=4 * loss)


class Sum(torch.autograd.Function):
    """The sum over all ranks, forward; or backward, if `is_forward` is false."""

    @staticmethod
    def forward(ctx, x, is_forward):
        ctx.is_forward = is_forward
        x = x.clone()
        if is_forward:
            distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if not ctx.is_forward:
            distributed.all_reduce(grad)
        return grad, None


class SplitByHand(nn.Module):
    """A feed-forward block whose layers are split over the ranks by the script itself; zeros are alike at first."""

    def __init__(self, rank, world):
        super().__init__()
        whole = net()
        self.first = nn.Linear(8, 16 // world).double()
        self.second = nn.Linear(16 // world, 4, bias=False).double()
        self.norm = nn.LayerNorm(4).double()
        with torch.no_grad():
            self.first.weight.copy_(whole[0].weight.chunk(world)[rank])
            self.first.bias.zero_()
            self.second.weight.copy_(whole[2].weight.chunk(world, 1)[rank])

    def forward(self, x):
        return self.norm(Sum.apply(self.second(self.first(Sum.apply(x, False)).relu()), True))


def split_by_hand(folder, rank, world, fault=None):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    train(SplitByHand(rank, world), folder, mesh=mesh, steps=12, fault=fault)


def copy_of_split_drifted(folder, rank, world):
    def fault(when, step, x, model):
        if when == "step" and step == 2 and rank == 1:
            with torch.no_grad():
                model.norm.bias[0] += 2**-8

    split_by_hand(folder, rank, world, fault)


class Adapted(nn.Module):
    """A layer beside which a branch begins with zeros."""

    def __init__(self):
        super().__init__()
        self.base, self.up, self.down = (exact(nn.Linear(*sizes).double()) for sizes in ((8, 4), (8, 16), (16, 4)))
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, x):
        return self.base(x) + self.down(self.up(x).tanh())


def with_zeros_split(folder, rank, world):
    """All parts of the layer of zeros look the same at first."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = parallelize_module(Adapted(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, folder, steps=12)


def main(folder: str, *cases: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    for case in cases:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            monitor = globals()[case](Path(folder, case), rank, world)
        if monitor is not None and rank:
            known = [str(monitor.run), len(monitor.report.findings)]
            Path(folder, f"{case}-{rank}.json").write_text(json.dumps(known))
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
