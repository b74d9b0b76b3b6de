"""Tensors of which each rank has a part: the part that is here, or, if all ranks join in, the whole."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor

from torchhook.errors import SessionError

PATIENCE = 60.0  # seconds that a rank waits for the others to want the whole as well
_times = count()


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor (told by its name, since its module takes long to import)."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__[:-2])


def local(tensor: Tensor) -> Tensor:
    """What of `tensor` is here: its local shard, once that has arrived."""
    if type(tensor) is Tensor:
        return tensor
    here: Any = tensor
    if is_sharded(tensor):
        here = here.to_local()
    return here.wait() if type(here).__name__ == "AsyncCollectiveTensor" else here  # type: ignore[no-any-return]


def whole(tensor: Tensor) -> Tensor:
    """A detached real copy of `tensor`, of all its shards if it has any: then a collective of all ranks."""
    detached: Any = tensor.detach()
    return detached.full_tensor() if is_sharded(tensor) else local(detached).clone()


def agree_on_the_whole() -> None:
    """Raise unless every rank comes here too: a collective that only some join would hang all of them."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    store, number = distributed.distributed_c10d._get_default_store(), next(_times)
    store.set(f"torchhook/whole/{number}/{distributed.get_rank()}", "here")
    everybody = [f"torchhook/whole/{number}/{rank}" for rank in range(distributed.get_world_size())]
    try:
        store.wait(everybody, timedelta(seconds=PATIENCE))
    except RuntimeError as error:
        raise SessionError(
            f"full=True gathers tensors from all ranks, and after {PATIENCE:.0f} s not all of them had asked for it;"
            " capture on every rank, or leave full out to keep the local shards"
        ) from error
