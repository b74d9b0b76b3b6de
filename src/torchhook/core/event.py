"""What a sink receives: one value at one site, with its full address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.site import Port, Site
from torchhook.core.snapshot import snapshot
from torchhook.core.torch_internals import graph_task_id
from torchhook.core.trees import Address, leaves, mapped

_NOT_READ: Any = object()


def recomputing() -> bool:
    """Whether autograd is running a backward: a forward inside it is repeated by a checkpoint."""
    return graph_task_id() != -1


def copied(tensor: Tensor) -> Tensor:
    """A real copy, for values inside a compiled graph, which reuses their memory."""
    return tensor.detach().clone() if tensor.requires_grad else tensor.clone()


class Event:
    """One value at one site.

    Attributes:
        site: The path and the port.
        live: The object inside the model itself, with its autograd graph; the model may overwrite it later.
        module: The module at the site.
        call: The number of the module's call within the pass, from 0.
        pass_number: The number of the pass.
        leaf: The address of the tensor within a nested value, for gradients, which come one tensor at a time.
        leaf_number: Its position among the tensors of that value.
        args: The positional arguments of the call (empty for outputs inside a compiled graph).
        kwargs: The keyword arguments, for the port ``input``.
        recomputed: Whether a checkpoint repeated the call in the backward.
        in_graph: Whether the value comes from a compiled graph.
        page: What the sink's `Keeper` returned when the pass began, if it has one.
        expected: For gradients, what `Sink.expect` returned in the forward.

    For the port ``input`` the value is the arguments of the call; a single positional argument is unwrapped.
    """

    __slots__ = (
        "_transform",
        "_value",
        "args",
        "call",
        "expected",
        "in_graph",
        "kwargs",
        "leaf",
        "leaf_number",
        "live",
        "module",
        "page",
        "pass_number",
        "recomputed",
        "site",
    )

    def __init__(
        self,
        site: Site,
        live: Any,
        module: nn.Module,
        call: int,
        pass_number: int,
        page: Any = None,
        *,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        leaf: Address = (),
        leaf_number: int = 0,
        recomputed: bool = False,
        in_graph: bool = False,
        expected: Any = None,
        transform: Callable[[Any, Site], Any] | None = None,
    ) -> None:
        self.site = site
        self.live = live
        self.module = module
        self.call = call
        self.pass_number = pass_number
        self.page = page
        self.args = args
        self.kwargs = kwargs or {}
        self.leaf = leaf
        self.leaf_number = leaf_number
        self.recomputed = recomputed
        self.in_graph = in_graph
        self.expected = expected
        self._transform = transform
        self._value = _NOT_READ

    @property
    def value(self) -> Any:
        """The value as it flowed, detached, transformed by the tap, and safe to keep.

        It is copied (on write) when it is first read. A sink that is not `lazy` finds it copied already.
        """
        if self._value is _NOT_READ:
            value = mapped(copied, self.live) if self.in_graph else snapshot(self.live)
            self._value = value if self._transform is None else self._transform(value, self.site)
        return self._value

    @property
    def transform(self) -> Callable[[Any], Any] | None:
        """The tap's transform; an error in it names the site."""
        transform, site = self._transform, self.site
        return None if transform is None else lambda value: transform(value, site)

    @property
    def path(self) -> str:
        """The path of the module, parameter or mark."""
        return self.site.path

    @property
    def port(self) -> Port:
        """The port of the site."""
        return self.site.port

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor in the value: the replicas of a model differ in it."""
        return next((tensor.device for _, tensor in leaves(self.live)), None)

    @property
    def rank(self) -> int:
        """The rank of this process, 0 if torch.distributed is not initialized."""
        distributed = torch.distributed
        return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0

    def __repr__(self) -> str:
        return f"Event({self.site}, call {self.call} of pass {self.pass_number})"
