"""Which part of the model and of the data a rank has, read from the model, or from the mesh where that cannot tell."""

from __future__ import annotations

import math
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from torchhook.core.instances import instances
from torchhook.core.selection import unwrapped
from torchhook.core.shards import is_sharded, shards_of_gathered
from torchhook.core.torch_internals import fsdp_parameters, layout_before_ddp, trains_in_join

TENSOR = ("tp", "tensor", "tensor_parallel", "sp", "cp", "context")  # dims of a mesh whose ranks share their samples
STAGES = ("pp", "pipe", "pipeline", "stage")


@dataclass(frozen=True)
class Seat:
    """A rank: its host, its stage of a pipeline, and its team, the ranks that work on the same samples as it does.

    `shards` says for each sharded parameter which part is here, `sole` of which of them no other rank has that part.
    `widths` has the last dim of whole inputs and outputs of sharded layers: smaller ones are parts.
    With `averages`, gradients are averaged over all teams.
    With `split`, the script itself splits parameters over the team, and a parameter that looks whole may be a part.
    With `pipelined`, torch's pipelining runs the stage, whose first step begins with values that it makes up.
    """

    rank: int
    host: str = ""
    stage: int = 0
    team: tuple[int, ...] = ()
    averages: bool = False
    split: bool = False
    pipelined: bool = False
    shards: dict[str, str] = field(default_factory=dict)
    sole: frozenset[str] = frozenset()
    widths: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def lead(self) -> int:
        """The first rank of its team."""
        return self.team[0] if self.team else self.rank


def seat_of(model: nn.Module, rank: int, mesh: Any = None) -> Seat:
    """The seat of this process.

    >>> seat_of(nn.Linear(2, 2), 3).team
    (3,)
    """
    inside = unwrapped(model)
    sharded_of = shards_of_gathered(inside)
    parameters = {path: sharded_of.get(id(p), p) for path, p in inside.named_parameters()}
    managed = {id(known) for module in inside.modules() for _, known in fsdp_parameters(module)}
    layouts = {path: known for path, p in parameters.items() if (known := _layout(p, id(p) in managed)) is not None}
    dims = frozenset() if mesh is None else frozenset(_named(mesh, TENSOR))
    meshes = [(mesh, dims)] if mesh is not None else [(known.mesh, known.tensor_dims) for known in layouts.values()]
    team = max((_team(known, dims) for known, dims in meshes), key=len, default=(rank,))
    wrapped, stage, stages = _around(inside)
    pipelined, stage = stage is not None, stage or 0
    if mesh is not None and (at := _named(mesh, STAGES)):
        stage, stages = mesh.get_coordinate()[at[0]], mesh.size(at[0])
    shards = {path: part for path, known in layouts.items() if (part := known.part)}
    of_stage = (distributed.get_world_size() if layouts else 1) // stages
    sole = frozenset(path for path in shards if layouts[path].parts == of_stage)
    averages = bool(managed) or wrapped or inside is not model
    return Seat(
        rank,
        socket.gethostname(),
        stage,
        team or (rank,),
        averages,
        bool(dims),
        pipelined,
        shards,
        sole,
        _widths(inside, layouts),
    )


def require_mesh(mesh: Any) -> None:
    """Raise unless `mesh` is a device mesh with names."""
    if mesh is not None and not getattr(mesh, "mesh_dim_names", None):
        raise TypeError(
            f"mesh must be a DeviceMesh whose dims have names such as 'dp', 'tp' and 'pp', not {mesh!r:.80};"
            " init_device_mesh(..., mesh_dim_names=...) makes one"
        )


class _Layout(NamedTuple):
    """How a parameter is laid out on a mesh; `managed` by fully_shard or not."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    managed: bool

    @property
    def tensor_dims(self) -> frozenset[int]:
        """The dims of the mesh whose ranks share their samples."""
        if self.mesh.mesh_dim_names:
            return frozenset(_named(self.mesh, TENSOR))
        if not self.managed:
            return frozenset(range(self.mesh.ndim))
        # Of fully_shard's mesh, the first dim is over samples; over the second, too, where the first has copies.
        is_both = self.mesh.ndim > 1 and not self.placements[0].is_replicate()
        return frozenset(range(1, self.mesh.ndim)) if is_both else frozenset()

    @property
    def part(self) -> str:
        """Which part is here, by the dims of the mesh; empty if it is whole."""
        here = self.mesh.get_coordinate()
        return ",".join(f"{number}:{here[number]}" for number in self._split if here)

    @property
    def parts(self) -> int:
        """In how many parts it is: if there are as many ranks, each has a part of its own."""
        return math.prod(map(self.mesh.size, self._split))

    @property
    def _split(self) -> list[int]:  # a shard of a shard has a kind of its own
        return [number for number, kind in enumerate(self.placements) if not kind.is_replicate()]


def _layout(parameter: Any, managed: bool) -> _Layout | None:
    """The layout of a parameter that is sharded, or was until it was made plain for DistributedDataParallel."""
    if is_sharded(parameter):
        return _Layout(parameter.device_mesh, parameter.placements, parameter.shape, managed)
    known = layout_before_ddp(parameter)
    return None if known is None else _Layout(known.mesh, known.placements, known.shape, managed)


def _widths(model: nn.Module, layouts: dict[str, _Layout]) -> dict[tuple[str, str], int]:
    """The last dim of the whole inputs and outputs of layers whose weights are sharded, by path and port."""
    found: dict[tuple[str, str], int] = {}
    for path, module in model.named_modules():
        weight = layouts.get(f"{path}.weight".removeprefix("."))
        if weight is not None and isinstance(module, nn.Linear | nn.Embedding):
            wide, narrow = weight.shape if isinstance(module, nn.Linear) else reversed(weight.shape)
            found |= {(path, "output"): wide, (path, "grad_output"): wide}
            if isinstance(module, nn.Linear):
                found[path, "input"] = narrow
    return found


def _named(mesh: Any, names: Iterable[str]) -> list[int]:
    return [number for number, name in enumerate(mesh.mesh_dim_names) if name.lower() in names]


def _team(mesh: Any, dims: frozenset[int]) -> tuple[int, ...]:
    """The ranks that differ from this one in these dims alone."""
    here = mesh.get_coordinate()
    if here is None or not dims:
        return ()
    place = tuple(slice(None) if number in dims else at for number, at in enumerate(here))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def _around(model: nn.Module) -> tuple[bool, int | None, int]:
    """Whether DistributedDataParallel has the model; which stage of torch's pipelining it is, and of how many."""
    if not distributed.is_initialized():
        return False, None, 1
    kind = getattr(sys.modules.get("torch.distributed.pipelining"), "PipelineStage", None)
    for stage in instances(kind) if kind else ():
        if stage.submod is model:
            return bool(_wrappers(model)), stage.stage_index, stage.group_size
    return bool(_wrappers(model)), None, 1


def may_end_apart(model: nn.Module) -> bool:
    """Whether DistributedDataParallel trains the model inside ``join()``, so that ranks may end apart."""
    return any(map(trains_in_join, _wrappers(unwrapped(model))))


def _wrappers(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    return [wrapper for wrapper in instances(nn.parallel.DistributedDataParallel) if wrapper.module is model]


def checksum(tensor: torch.Tensor, ordered: bool = False) -> torch.Tensor:
    """The sum of the bits of a tensor, on its device: equal tensors have the same, and any drift changes it.

    With `ordered`, the order of the values counts, too, which takes memory for as many integers.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0000002]))
    tensor(False)
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().reshape(-1)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    if ordered:
        bits = flat.view(integer)
        return (bits * torch.arange(1, 2 * bits.numel(), 2, device=bits.device)).sum(dtype=torch.int64)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    even = flat.numel() - flat.numel() % (8 // flat.element_size())  # words of eight bytes are summed far faster
    return flat[:even].view(torch.int64).sum() + flat[even:].view(integer).sum(dtype=torch.int64)
