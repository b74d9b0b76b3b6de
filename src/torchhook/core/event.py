"""What a tap is told: one value at one site, with its full address."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchhook.core.site import Port, Site
from torchhook.core.trees import Address, leaves


def recomputing() -> bool:
    """Whether autograd is running a backward: a forward inside it is a checkpoint's second run."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, eq=False)
class Event:
    """One value at one site.

    `value` is the value as it flowed at that moment, detached and safe to keep; `live` is the very
    object inside the model, with its graph and whatever later happens to it. For the port ``input``
    both are what the module was called with, a single positional argument unwrapped, and `kwargs`
    are its keywords. `args` are the positional arguments of the call (none inside a compiled graph, where
    `live` is a copy). A gradient of a nested value comes one leaf at a time, and `leaf` says which.
    """

    site: Site
    value: Any
    live: Any
    module: nn.Module
    call: int
    pass_number: int
    leaf: Address = ()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    recomputed: bool = False

    @property
    def path(self) -> str:
        """Where: the path of the module, parameter or mark."""
        return self.site.path

    @property
    def port(self) -> Port:
        """What: the port of the site."""
        return self.site.port

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor in the value: it tells replicas of one model apart."""
        return next((tensor.device for _, tensor in leaves(self.live)), None)

    @property
    def rank(self) -> int:
        """The rank of this process, 0 where nothing is distributed."""
        distributed = torch.distributed
        return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
