"""Catching gradients with tensor hooks on the values that flow.

They see the gradient of the value as it was at that moment, in any container, even if a later op overwrites it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchhook.core.compiled import received
from torchhook.core.hooks.tensors import SourceNode, apart, hook_gradient
from torchhook.core.passes import Pass
from torchhook.core.sink import Act, Receive
from torchhook.core.torch_internals import version_of
from torchhook.core.trees import Address, Arguments, leaves, replaced

if TYPE_CHECKING:
    from torchhook.core.hooks.point import Point


class GradHook:
    """A hook on a tensor that flowed: passes its gradient on as long as the session is open."""

    __slots__ = ("address", "number", "point", "receives")
    __torch_unserializable__ = True  # so that torch.save of a tensor with this hook does not warn

    def __init__(self, point: Point, receives: list[Receive], number: int, address: Address) -> None:
        self.point = point
        self.receives = receives
        self.number = number
        self.address = address

    def __call__(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not self.point.scope.alive:
            return None
        return self.point.receive(self.receives, self.number, self.address, gradient)


class InputViews:
    """The inputs of a call as identity views, which receive the gradient through this module alone.

    The views are hooked after the forward. If the forward overwrote its input in place, the view is no longer part of
    the graph, and the gradient is caught at the node that made the input instead.
    """

    __slots__ = ("arguments", "receives", "seen")

    def __init__(self, arguments: Arguments, receives: list[Receive]) -> None:
        self.receives = receives
        self.seen: list[tuple[int, Address, Tensor, int, SourceNode | None]] = []
        views: dict[int, Tensor] = {}  # by number of the leaf: the same tensor may be passed twice
        if torch.is_grad_enabled():
            for number, (address, x) in enumerate(leaves(arguments)):
                if x.requires_grad:
                    view = views[number] = apart(x)
                    self.seen.append((number, address, view, version_of(view), SourceNode.of(x)))
        self.arguments = replaced(arguments, views) if views else arguments

    def hook(self, point: Point) -> None:
        """Catch the gradients of the views."""
        for number, address, view, version, source in self.seen:
            hook = GradHook(point, self.receives, number, address)
            if version_of(view) == version:
                view.register_hook(hook)
            elif source is not None:  # always true: autograd does not allow a leaf to be overwritten
                source.hook(hook, point.path)


def catching(catches: list[Act], point: Point) -> Act:
    """The act that hooks every tensor in an output for its gradient."""

    def catch(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        receives = received(catches, pass_, call, value, args)
        if not receives:
            return None
        if pass_.grad_enabled and not torch.is_grad_enabled():
            point.awaited.put(value, receives)
        return hooked(value, receives, point)

    return catch


def hooked(value: Any, receives: list[Receive], point: Point) -> Any:
    """Hook every tensor in `value` for its gradient; returns the value to continue with, or None if it is the same."""
    views: dict[int, Tensor] = {}
    for number, (address, tensor) in enumerate(leaves(value)):
        if not tensor.requires_grad:
            continue
        if tensor.is_leaf:
            if not torch.is_grad_enabled():
                continue
            views[number] = apart(tensor)
        hook_gradient(views.get(number, tensor), GradHook(point, receives, number, address), point.path)
    return replaced(value, views) if views else None
