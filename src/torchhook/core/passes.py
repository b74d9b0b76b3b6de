"""Passes, and which of them a session sees.

A pass is one outermost forward of the session's model. A session sees the passes of the thread and
context that opened it, or, with ``scope="all"``, everybody's. Routing is one look at a context
variable, so that several sessions in several threads share a model without a lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import nn

from torchhook.core.event import recomputing
from torchhook.core.trees import leaves

# The tokens of the sessions that this context has opened. Tokens, not sessions: a context must not
# keep a session alive, or dropping it could not take its hooks away.
sessions_here: ContextVar[frozenset[object]] = ContextVar("torchhook_sessions_here", default=frozenset())


class Page(deque[Any]):
    """What is kept of one pass: (number of the site, call, value), in execution order.

    The call may be None, and is then told by the place on the page.
    """

    __slots__ = ("number", "outside")

    def __init__(self, number: int, outside: bool) -> None:
        self.number = number
        self.outside = outside  # calls of submodules that no forward of the model contains


class Keeper(Protocol):
    """Whatever keeps something of each pass."""

    def page(self, number: int, outside: bool) -> Page:
        """Begin the page of pass `number`, or of the calls outside of any pass after it."""


class Pass:
    """One forward of the model under way: how often each module was called so far, and what is kept."""

    __slots__ = ("counts", "device", "keep", "number", "outside", "pages", "stack", "waiting")

    def __init__(self, number: int, scope: Scope, pages: list[Page], outside: bool = False) -> None:
        self.number = number
        self.counts = [0] * scope.sites
        if pages:
            self.keep = pages[0].append  # for the hooks in a hurry
        self.waiting = scope.awaited  # sites that must be seen before the pass can stop
        self.pages = pages
        self.outside = outside
        self.stack: list[tuple[int, int, Any]] = []  # calls under way: module's index, call, luggage
        self.device: torch.device | None = None

    def count(self, index: int) -> int:
        """The number of this call of module `index`, from 0."""
        call = self.counts[index]
        self.counts[index] = call + 1
        return call

    def leave(self, index: int) -> tuple[int, Any]:
        """End the call of module `index` that began last; calls inside it that raised never ended."""
        while True:
            module, call, luggage = self.stack.pop()
            if module == index:
                return call, luggage


class Scope:
    """The passes that one session sees."""

    __slots__ = ("alive", "awaited", "current", "home", "keepers", "last", "passes", "shared", "sites", "task", "token")

    def __init__(self, shared: bool) -> None:
        self.token = object()
        self.alive = True
        self.shared = shared
        self.home = threading.get_ident()
        self.task = _running_task()
        self.current: Pass | None = None  # the opener's pass, read by every hook; None if shared
        self.passes: dict[int, Pass] = {}  # all others, by thread
        self.last: Pass | None = None
        self.sites = 0
        self.awaited = 0
        self.keepers: list[Keeper] = []
        sessions_here.set(sessions_here.get() | {self.token})

    def close(self) -> None:
        """See nothing any more."""
        self.alive = False
        self.current = None
        self.passes.clear()
        sessions_here.set(sessions_here.get() - {self.token})

    def new_site(self) -> int:
        """The index of one more hooked module."""
        self.sites += 1
        if self.last is not None:
            for pass_ in self._under_way():
                pass_.counts.append(0)
        return self.sites - 1

    def keep(self, keeper: Keeper) -> int:
        """Where in ``Pass.pages`` the page of `keeper` lies."""
        if keeper not in self.keepers:
            self.keepers.append(keeper)
            for pass_ in self._under_way():
                pass_.pages.append(keeper.page(pass_.number, pass_.outside))
        return self.keepers.index(keeper)

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """A forward of the model begins; whether it is a pass, which `end` must end.

        Inside another forward of the model, by this thread, it belongs to that pass.
        """
        if self.current is None and not self.shared and self.token in sessions_here.get():
            self.current = self._new_pass()  # the common case, in short
            self.passes.clear()  # calls outside of any pass and replicas' threads, all older
            return True
        mine = self._mine()
        if not self._sees(module) or (mine is not None and not mine.outside):
            return False
        pass_ = self._joined(args) if _is_replica(module) else self._new_pass()
        if self.shared or not self._is_home():
            self.passes[threading.get_ident()] = pass_
        else:
            self.current = pass_
        return True

    def end(self) -> None:
        """The pass that this thread began is over, whether or not it raised."""
        if self.shared or not self._is_home():
            self.passes.pop(threading.get_ident(), None)
        else:
            self.current = None

    def route(self, module: nn.Module) -> Pass | None:
        """The pass that a call of `module` belongs to, or None if it is not this session's to see."""
        if not self._sees(module) or recomputing():
            return None
        mine = self._mine()
        if mine is not None and not (mine.outside and self._is_past(mine)):
            return mine
        above = self.current if _is_replica(module) else None  # the session's model holds the replicas
        mine = self._twin(above) if above else self._new_pass(outside=True)
        self.passes[threading.get_ident()] = mine
        return mine

    def route_backward(self) -> Pass | None:
        """The pass that a parameter's gradient belongs to."""
        if self.alive and (self.shared or self._is_home() or self._is_behind_backward()):
            return self.last or self._new_pass(outside=True)
        return None

    def _sees(self, module: nn.Module) -> bool:
        return self.alive and (self.shared or self._is_home() or _is_replica(module))

    def _is_home(self) -> bool:
        if self.token in sessions_here.get():
            return True
        # A notebook may run each cell in a task of its own: what an earlier cell opened is still ours.
        return self.task is not None and self.task.done() and self.home == threading.get_ident()

    def _is_behind_backward(self) -> bool:
        """Whether one of autograd's own threads works for ours: from torch 2.13 it has the caller's context."""
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return False
        if not torch._C._is_key_in_tls("context"):
            return True  # nobody can tell: better to see too much than to miss it
        return self.token in torch._C._get_obj_in_tls("context").get(sessions_here, ())

    def _mine(self) -> Pass | None:
        if self.current is not None and self._is_home():
            return self.current
        return self.passes.get(threading.get_ident())

    def _is_past(self, pass_: Pass) -> bool:
        return self.last is not None and self.last.number > pass_.number

    def _new_pass(self, outside: bool = False) -> Pass:
        with _lock:
            number = (-1 if self.last is None else self.last.number) + (not outside)
            self.last = Pass(number, self, [keeper.page(number, outside) for keeper in self.keepers], outside)
            return self.last

    def _joined(self, args: tuple[Any, ...]) -> Pass:
        """Replicas of one DataParallel forward run on different devices, each in a thread of its own."""
        device = next((tensor.device for _, tensor in leaves(args)), None)
        others = {pass_.device for pass_ in self.passes.values()}
        joins = bool(others) and device not in others
        pass_ = self._twin(self.last) if joins and self.last else self._new_pass()
        pass_.device = device
        return pass_

    def _twin(self, pass_: Pass) -> Pass:
        return Pass(pass_.number, self, pass_.pages)

    def _under_way(self) -> set[Pass]:
        return {pass_ for pass_ in (self.current, self.last, *self.passes.values()) if pass_ is not None}


_lock = threading.Lock()


def _running_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None


def _is_replica(module: nn.Module) -> bool:
    return bool(module.__dict__.get("_is_replica", False))
