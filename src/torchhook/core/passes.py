"""A pass is one outermost forward of a session's model, with what its backward brings."""

from __future__ import annotations

from typing import Any

import torch

from torchhook.core.page import Page


class StopForward(BaseException):
    """Ends a forward once everything was seen. Not an Exception, so that the model's own handlers do not catch it."""

    def __init__(self, session: object) -> None:
        self.session = session  # what stands for the session that stops: its `Opener`


class Pass:
    """One forward of the model under way: how often each module was called so far, and what is kept."""

    __slots__ = (
        "call_counts",
        "device",
        "grad_enabled",
        "in_graph",
        "number",
        "open_ended",
        "outside",
        "pages",
        "stack",
        "stop_sites_left",
    )

    def __init__(self, number: int, points: int, pages: list[Page], stop_sites: int, outside: bool = False) -> None:
        self.number = number
        self.call_counts = [0] * points  # by index of the point
        self.stop_sites_left = stop_sites  # how many sites must still be seen before the pass can stop
        self.pages = pages  # one for each keeper of the scope
        self.outside = outside  # whether it holds the calls of submodules outside of any forward of the model
        self.open_ended = outside  # whether nothing reports its end, so that the next pass ends it
        self.in_graph = False  # whether a compiled graph began it
        self.stack: list[tuple[int, int, Any, Any]] = []  # calls under way: index, call, views of inputs, arguments
        self.device: torch.device | None = None  # of a DataParallel replica
        self.grad_enabled = torch.is_grad_enabled()  # whether tensors in it may require gradients

    def next_call(self, index: int) -> int:
        """Count one more call of the module with this `index`; returns its number, from 0."""
        call = self.call_counts[index]
        self.call_counts[index] = call + 1
        return call

    def enter(self, index: int, call: int, views: Any, args: Any) -> None:
        """A call begins, which `leave` ends."""
        if len(self.stack) > _DEEP:  # calls outside of any pass that raised never end
            del self.stack[: _DEEP // 2]
        self.stack.append((index, call, views, args))

    def leave(self, index: int, args: Any) -> tuple[int, Any] | None:
        """End the call of module `index` with `args`, and those inside it that raised; returns its number and views.

        None if it began before there was a hook to see it.
        """
        mine = [depth for depth, (module, *_) in enumerate(self.stack) if module == index]
        if not mine:
            return None
        depth = next((depth for depth in reversed(mine) if self.stack[depth][3] is args), mine[-1])
        _, call, views, _ = self.stack[depth]
        del self.stack[depth:]
        return call, views


_DEEP = 10_000
