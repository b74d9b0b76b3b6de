"""Passes, and which of them a session sees.

A pass is one outermost forward of the session's model. A session sees the passes of the thread and
context that opened it, or, with ``scope="all"``, everybody's. Who runs a forward is asked once, as it
begins; inside it a hook only has to know its thread.
"""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from torchhook.core.event import recomputing
from torchhook.core.page import Keeper, Page
from torchhook.core.torch_internals import context_of_backward, is_jit_tracing, is_replica, transform_level
from torchhook.core.trees import leaves

if TYPE_CHECKING:
    from torchhook.core.hooks.point import Point


class StopForward(BaseException):
    """Ends a forward once all is seen. Not an Exception: a model's own handlers must not catch it."""

    def __init__(self, token: object) -> None:
        self.token = token


class Token:
    """Stands for a session in the contexts that opened it, which must not keep the session alive."""

    __slots__ = ("alive",)

    def __init__(self) -> None:
        self.alive = True


sessions_here: ContextVar[frozenset[Token]] = ContextVar("torchhook_sessions_here", default=frozenset())


class Switch(Protocol):
    """Whatever says whether there is anything to see now."""

    active: bool


class Always:
    """There is."""

    active = True


class Pass:
    """One forward of the model under way: how often each module was called so far, and what is kept."""

    __slots__ = (
        "counts",
        "device",
        "graded",
        "in_graph",
        "list_entry",
        "loose",
        "number",
        "outside",
        "pages",
        "stack",
        "waiting",
    )

    def __init__(self, number: int, scope: Scope, pages: list[Page], outside: bool = False) -> None:
        self.number = number
        self.counts = [0] * len(scope.points)
        self.waiting = scope.awaited  # sites that must be seen before the pass can stop
        self.pages = pages
        self.outside = outside
        self.in_graph = False  # whether a compiled graph began it
        self.loose = outside  # nobody will say that it ended; the next pass ends it
        self.stack: list[tuple[int, int, Any, Any]] = []  # calls under way: index, call, luggage, arguments
        self.device: torch.device | None = None
        self.graded = torch.is_grad_enabled()  # whether what flows may have a graph
        if pages:
            self.prepare()

    def prepare(self) -> None:
        """For the fastest hooks, which are entries of the first page themselves."""
        self.list_entry = self.pages[0].append

    def count(self, index: int) -> int:
        """The number of this call of module `index`, from 0."""
        call = self.counts[index]
        self.counts[index] = call + 1
        return call

    def enter(self, index: int, call: int, luggage: Any, args: Any) -> None:
        """A call begins that `leave` ends."""
        if len(self.stack) > _DEEP:  # calls that raised outside of any pass never end
            del self.stack[: _DEEP // 2]
        self.stack.append((index, call, luggage, args))

    def leave(self, index: int, args: Any) -> tuple[int, Any] | None:
        """The call of module `index` with `args` ends; calls inside it that raised never did.

        None if it began before there was a hook to see it.
        """
        mine = [depth for depth, (module, *_) in enumerate(self.stack) if module == index]
        if not mine:
            return None
        depth = next((depth for depth in reversed(mine) if self.stack[depth][3] is args), mine[-1])
        _, call, luggage, _ = self.stack[depth]
        del self.stack[depth:]
        return call, luggage


class Scope:
    """The passes that one session sees."""

    __slots__ = (
        "again",
        "alive",
        "awaited",
        "current",
        "cut",
        "full",
        "home",
        "humble",
        "keepers",
        "key",
        "last",
        "missed",
        "passes",
        "points",
        "recomputed",
        "shared",
        "task",
        "tickets",
        "token",
        "when",
    )

    def __init__(self, shared: bool, recomputed: bool = False, when: Switch | None = None) -> None:
        self.token = Token()
        self.when: Switch = when or Always()
        self.alive = True
        self.shared = shared
        self.recomputed = recomputed  # whether what a checkpoint runs again is wanted too
        self.again: Pass | None = None  # where that goes
        self.missed = ""  # why calls were not seen
        self.cut = False  # whether another session has ended a pass before its end
        self.full = False  # whether sharded values are seen before they are taken apart
        self.humble = False  # whether a forward in which taps can see nothing is no reason to refuse it
        self.home = threading.get_ident()
        self.task = _running_task()
        self.passes: dict[int, Pass] = {}  # by thread
        self.current: Pass | None = None  # the one of the home thread, for the hooks; None if shared
        self.last: Pass | None = None
        self.points: list[Point] = []  # all that were made, by their index
        self.tickets: dict[int, Any] = {}  # forwards of compiled graphs that wait for their backward
        self.key = next(_keys)  # by which compiled graphs know it
        scopes[self.key] = self
        self.awaited = 0
        self.keepers: list[Keeper] = []
        sessions_here.set(frozenset(token for token in sessions_here.get() if token.alive) | {self.token})

    def close(self) -> None:
        """See nothing any more."""
        self.alive = self.token.alive = False
        self.current = self.again = None
        self.passes.clear()
        self.points.clear()
        self.tickets.clear()
        scopes.pop(self.key, None)
        sessions_here.set(sessions_here.get() - {self.token})

    def add(self, point: Point) -> int:
        """The index of one more place that is hooked."""
        self.points.append(point)
        if self.last is not None:
            for pass_ in {self.last, *self.passes.values()}:
                pass_.counts.append(0)
        return len(self.points) - 1

    def keep(self, keeper: Keeper) -> int:
        """Where in ``Pass.pages`` the page of `keeper` lies."""
        for position, known in enumerate(self.keepers):
            if known is keeper:
                return position
        self.keepers.append(keeper)
        if self.last is not None:
            for pass_ in {self.last, *self.passes.values()}:
                pass_.pages.append(keeper.page(pass_.number, pass_.outside))
                pass_.prepare()
        return len(self.keepers) - 1

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """A forward of the model begins; whether it is a pass, which `end` must end.

        Inside another forward of the model, by the same thread, it belongs to that pass.
        """
        thread = threading.get_ident()
        if not self.when.active or recomputing():  # a checkpoint around the whole model runs it again
            return False
        if not self._sees(module, thread):
            if self.alive:
                self.missed = "in another thread or context than the one that attached; pass scope='all' to see those"
            return False
        mine = self.passes.get(thread)
        if mine is not None and not mine.loose:
            return False
        pass_ = self.passes[thread] = self._joined(args) if is_replica(module) else self._new_pass()
        if thread == self.home and not self.shared:
            self.current = pass_
        return True

    def end(self) -> None:
        """The pass that this thread began is over, whether or not it raised."""
        thread = threading.get_ident()
        self.passes.pop(thread, None)
        if thread == self.home:
            self.current = None

    def begin_in_graph(self) -> None:
        """The same, told by a compiled graph, whose taps see every thread."""
        thread = threading.get_ident()
        mine = self.passes.get(thread)
        if mine is None or mine.loose or mine.in_graph:  # one that was in a graph and never ended has raised
            self.passes[thread] = pass_ = self._new_pass()
            pass_.in_graph = True

    def end_in_graph(self) -> None:
        """It is over; one that was begun outside of the graph goes on."""
        mine = self.passes.get(threading.get_ident())
        if mine is not None and mine.in_graph:
            self.end()

    def has_stopped(self) -> bool:
        """Whether the pass that this thread began has seen all that it waited for."""
        pass_ = self.passes.get(threading.get_ident())  # gone if the session was closed meanwhile
        return self.awaited > 0 and pass_ is not None and pass_.waiting == 0

    def route(self, module: nn.Module) -> Pass | None:
        """The pass that a call of `module` belongs to, or None if it is not this session's to see."""
        if not self.when.active:
            return None
        if recomputing():
            return self._repeated()
        if not self._sees(module, threading.get_ident()):
            return None
        return self.under_way(is_replica(module))

    def under_way(self, in_replica: bool = False) -> Pass:
        """The pass that this thread is in, or one for the calls outside of any."""
        thread = threading.get_ident()
        mine = self.passes.get(thread)
        if mine is not None and not (mine.loose and self._is_past(mine)):
            return mine
        if self.current is not None and in_replica:  # the session's model holds the replicas
            mine = self._twin(self.current)
            mine.loose = True
        else:
            mine = self._new_pass(outside=True)
        self.passes[thread] = mine
        return mine

    def route_backward(self) -> Pass | None:
        """The pass that a parameter's gradient belongs to."""
        if self.sees_backward():
            return self.last or self._new_pass(outside=True)
        return None

    def sees_backward(self) -> bool:
        """Whether the backward that is running is this session's to see."""
        return self.alive and (self.shared or self._is_home(threading.get_ident()) or self._is_behind_backward())

    def _repeated(self) -> Pass | None:
        """The pass for calls that a checkpoint runs again, None if nobody wants them."""
        if not self.recomputed:
            self.missed = self.missed or "while a checkpoint computed again; pass recomputed=True to see that"
            return None
        if not self.sees_backward():
            return None
        if self.again is None or self._is_past(self.again):
            self.again = self._new_pass(outside=True)
            for page in self.again.pages:
                page.recomputed = True
        return self.again

    def _sees(self, module: nn.Module, thread: int) -> bool:
        if self.humble and is_transformed():
            return False
        return self.alive and (self.shared or self._is_home(thread) or is_replica(module))

    def _is_home(self, thread: int) -> bool:
        if thread != self.home:
            return False
        # A notebook may run each cell in a task of its own: what an earlier cell opened is still ours.
        return self.token in sessions_here.get() or (self.task is not None and self.task.done())

    def _is_behind_backward(self) -> bool:
        """Whether one of autograd's own threads works for ours: from torch 2.13 it has the caller's context."""
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return False
        context = context_of_backward()
        if context is None:
            return True  # unknown: better to see too much than to miss it
        return self.token in context.get(sessions_here, ())

    def _is_past(self, pass_: Pass) -> bool:
        return self.last is not None and self.last.number > pass_.number

    def _new_pass(self, outside: bool = False) -> Pass:
        with _lock:
            number = -1 if self.last is None else self.last.number
            if not outside:
                number += 1
            pages = [keeper.page(number, outside) for keeper in self.keepers]
            pass_ = self.last = Pass(number, self, pages, outside)
        return pass_

    def _joined(self, args: tuple[Any, ...]) -> Pass:
        """Replicas of one DataParallel forward run on different devices, each in a thread of its own."""
        device = next((tensor.device for _, tensor in leaves(args)), None)
        others = {pass_.device for pass_ in self.passes.values()}
        joins = bool(others) and device not in others
        pass_ = self._twin(self.last) if joins and self.last else self._new_pass()
        pass_.device = device
        return pass_

    def _twin(self, pass_: Pass) -> Pass:
        return Pass(pass_.number, self, list(pass_.pages))


scopes: dict[int, Scope] = {}
"""Those of the open sessions, by their keys."""

_keys = count()
_lock = threading.RLock()
_DEEP = 10_000


def _running_task() -> asyncio.Task[Any] | None:
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


def is_transformed() -> bool:
    """Whether what flows now means nothing outside: in torch.func, torch.export or torch.jit.trace."""
    return transform_level() is not None or torch.compiler.is_exporting() or is_jit_tracing()
