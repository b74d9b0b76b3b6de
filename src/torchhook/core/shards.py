"""Sharded tensors, of which each rank has a part: the local shard, or, if all ranks take part, the whole tensor."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.errors import SessionError
from torchhook.core.torch_internals import default_store, fsdp_parameters

PATIENCE = 60.0  # seconds that a rank waits for the others to ask for the whole tensors, too
_agreed = [0]  # how often all ranks did


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor (recognised by the class name, since its module takes long to import)."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__[:-2])


def local(tensor: Tensor) -> Tensor:
    """The local shard of `tensor`, once it has arrived; `tensor` itself if it is not sharded."""
    if type(tensor) is Tensor:
        return tensor
    here: Any = tensor
    if is_sharded(tensor):
        here = here.to_local()
    arrived: Tensor = here.wait() if type(here).__name__ == "AsyncCollectiveTensor" else here
    return arrived


def placements(tensor: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Which part of a sharded tensor is here: dimension, number of the part and number of parts, for each mesh dim."""
    if not is_sharded(tensor):
        return ()
    sharded: Any = tensor
    mesh = sharded.device_mesh
    return tuple(
        (placement.dim, mesh.get_local_rank(number), mesh.size(number))
        for number, placement in enumerate(sharded.placements)
        if placement.is_shard()
    )


def whole(tensor: Tensor) -> Tensor:
    """A detached real copy of `tensor`. If it is sharded, all shards are gathered, which all ranks must do together."""
    detached: Any = tensor.detach()
    return local(detached.full_tensor() if is_sharded(tensor) else detached).clone()


def tied(x: Tensor, new: Tensor) -> Tensor:
    """`new`, connected to the graph of `x` with a zero gradient: distributed ranks wait for each other's gradients."""
    if new is x or not x.requires_grad or not torch.is_grad_enabled() or not _is_distributed():
        return new
    return torch.where(torch.zeros((), dtype=torch.bool, device=x.device), x, new)


def shards_of_gathered(model: nn.Module) -> dict[int, nn.Parameter]:
    """The sharded parameters of FSDP2, by the ids of the gathered ones that may be in their places now."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules() if _is_distributed() else ():
        found.update({id(gathered): sharded for gathered, sharded in fsdp_parameters(module)})
    return found


def agree_on_the_whole(sites: list[str]) -> None:
    """Raise unless every rank calls this with the same sites: a collective that only some ranks join would hang."""
    if not _is_distributed():
        return
    store, rank = default_store(), torch.distributed.get_rank()
    keys = [f"torchhook/whole/{_agreed[0]}/{other}" for other in range(torch.distributed.get_world_size())]
    store.set(keys[rank], "\n".join(sites))
    try:
        store.wait(keys, timedelta(seconds=PATIENCE))
    except RuntimeError as error:
        store.delete_key(keys[rank])  # otherwise the others would take it for an answer next time
        raise SessionError(
            f"full=True gathers tensors from all ranks, but after {PATIENCE:.0f} s not all of them had asked for it;"
            " capture on every rank, or leave full out to keep the local shards"
        ) from error
    _agreed[0] += 1
    if len({store.get(key) for key in keys}) > 1:
        raise SessionError("full=True gathers tensors from all ranks, but they ask for different sites")


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
