"""Which part of the model and of the data a rank has, read from the model, or from the mesh where that cannot tell."""

from __future__ import annotations

import gc
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import distributed, nn

from torchhook.core.selection import unwrapped
from torchhook.core.shards import is_sharded, shards_of_gathered
from torchhook.core.torch_internals import fsdp_parameters

TENSOR = ("tp", "tensor", "tensor_parallel", "sp", "cp", "context")  # dims of a mesh whose ranks share their samples
STAGES = ("pp", "pipe", "pipeline", "stage")


@dataclass(frozen=True)
class Seat:
    """A rank: its host, its stage of a pipeline, and its team, the ranks that work on the same samples as it does.

    `shards` says for each sharded parameter which part is here, `sole` of which of them no other rank has that part.
    With `averages`, gradients are averaged over all teams.
    With `pipelined`, torch's pipelining runs the stage, whose first step begins with values that it makes up.
    """

    rank: int
    host: str = ""
    stage: int = 0
    team: tuple[int, ...] = ()
    averages: bool = False
    pipelined: bool = False
    shards: dict[str, str] = field(default_factory=dict)
    sole: frozenset[str] = frozenset()

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
    sharded = [parameter for parameter in parameters.values() if is_sharded(parameter)]
    managed = {id(known) for module in inside.modules() for _, known in fsdp_parameters(module)}
    meshes = [(mesh, frozenset(_named(mesh, TENSOR)))] if mesh is not None else map(_tensor_dims(managed), sharded)
    team = max((_team(known, dims) for known, dims in meshes), key=len, default=(rank,))
    wrapped, stage = _around(inside)
    pipelined, stage = stage is not None, stage or 0
    if mesh is not None and (dims := _named(mesh, STAGES)):
        stage = mesh.get_coordinate()[dims[0]]
    shards = {path: part for path, parameter in parameters.items() if (part := _part(parameter))}
    sole = frozenset(path for path in shards if not _has_copies(parameters[path]))
    averages = bool(managed) or wrapped or inside is not model
    return Seat(rank, socket.gethostname(), stage, team or (rank,), averages, pipelined, shards, sole)


def require_mesh(mesh: Any) -> None:
    """Raise unless `mesh` is a device mesh with names."""
    if mesh is not None and not getattr(mesh, "mesh_dim_names", None):
        raise TypeError(
            f"mesh must be a DeviceMesh whose dims have names such as 'dp', 'tp' and 'pp', not {mesh!r:.80};"
            " init_device_mesh(..., mesh_dim_names=...) makes one"
        )


def _tensor_dims(managed: set[int]) -> Any:
    """A function of a sharded parameter: its mesh, and the dims of that which share their samples."""

    def dims(parameter: Any) -> tuple[Any, frozenset[int]]:
        mesh = parameter.device_mesh
        if mesh.mesh_dim_names:
            return mesh, frozenset(_named(mesh, TENSOR))
        if id(parameter) not in managed:
            return mesh, frozenset(range(mesh.ndim))
        # Of fully_shard's mesh, the first dim is over samples; over the second, too, where the first has copies.
        is_both = mesh.ndim > 1 and not parameter.placements[0].is_replicate()
        return mesh, frozenset(range(1, mesh.ndim)) if is_both else frozenset()

    return dims


def _part(parameter: Any) -> str:
    """Which part of a parameter is here, by the dims of its mesh; empty if it is whole."""
    if not is_sharded(parameter):
        return ""
    here = parameter.device_mesh.get_coordinate()
    kinds = enumerate(parameter.placements)  # a shard of a shard has a kind of its own
    return ",".join(f"{number}:{here[number]}" for number, kind in kinds if here and not kind.is_replicate())


def _has_copies(parameter: Any) -> bool:
    """Whether other ranks of its mesh have the same part of a sharded parameter."""
    mesh = parameter.device_mesh
    return any(kind.is_replicate() and mesh.size(number) > 1 for number, kind in enumerate(parameter.placements))


def _named(mesh: Any, names: Iterable[str]) -> list[int]:
    return [number for number, name in enumerate(mesh.mesh_dim_names) if name.lower() in names]


def _team(mesh: Any, dims: frozenset[int]) -> tuple[int, ...]:
    """The ranks that differ from this one in these dims alone."""
    here = mesh.get_coordinate()
    if here is None or not dims:
        return ()
    place = tuple(slice(None) if number in dims else at for number, at in enumerate(here))
    return tuple(sorted(mesh.mesh[place].flatten().tolist()))


def _around(model: nn.Module) -> tuple[bool, int | None]:
    """Whether DistributedDataParallel has the model, and which stage of torch's pipelining it is, if it is one."""
    kind = getattr(sys.modules.get("torch.distributed.pipelining"), "PipelineStage", ())
    wrapped, stage = False, None
    for known in gc.get_objects() if distributed.is_initialized() else ():
        if type(known) is nn.parallel.DistributedDataParallel:
            wrapped |= known.module is model
        elif kind and isinstance(known, kind) and known.submod is model:
            stage = known.stage_index
    return wrapped, stage


def checksum(tensor: torch.Tensor, ordered: bool = False) -> torch.Tensor:
    """The sum of the bits of a tensor, on its device: equal tensors have the same, and any drift changes it.

    With `ordered`, the order of the values counts, too, which takes memory for as many integers.

    >>> checksum(torch.tensor([1.0, 2.0])) == checksum(torch.tensor([1.0, 2.0000002]))
    tensor(False)
    """
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    bits = plain.detach().contiguous().view(whole[plain.element_size()])
    if ordered:
        bits = bits.reshape(-1) * torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    return bits.sum(dtype=torch.int64)
