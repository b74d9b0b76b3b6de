"""Which passes a session sees: those of the thread and context that opened it, or, if it is shared, those of all.

That is decided once for each forward, when it begins. Inside the forward a hook only has to compare threads.
"""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from torchhook.core.event import recomputing
from torchhook.core.page import Keeper, Page
from torchhook.core.passes import Pass
from torchhook.core.torch_internals import context_of_backward, is_replica, is_transformed
from torchhook.core.trees import leaves

if TYPE_CHECKING:
    from torchhook.core.hooks.point import Point

_lock = threading.RLock()


class Switch(Protocol):
    """Says whether a session sees anything at the moment."""

    active: bool


class Awaiting(Protocol):
    """Takes the gradients of what a compiled graph has seen: the position of the value, the leaf, the gradient."""

    def receive(self, position: int, leaf: int, gradient: Tensor, /) -> None:
        """Take the gradient of one tensor."""


class AlwaysOn:
    """The switch of a session that has none."""

    active = True


class Opener:
    """The thread, context and asyncio task that opened a session.

    It stands for the session in `sessions_here`: a context must not keep the session itself alive.
    """

    __slots__ = ("alive", "task", "thread")

    def __init__(self) -> None:
        self.alive = True
        self.thread = threading.get_ident()
        self.task = None if asyncio._get_running_loop() is None else asyncio.current_task()
        sessions_here.set(frozenset(opener for opener in sessions_here.get() if opener.alive) | {self})

    def close(self) -> None:
        """The session has ended."""
        self.alive = False
        self.task = None
        sessions_here.set(sessions_here.get() - {self})

    def is_here(self) -> bool:
        """Whether the code that runs now belongs to the thread and context that opened the session."""
        if threading.get_ident() != self.thread:
            return False
        # A notebook may run each cell in a task of its own: what an earlier cell opened is still ours.
        return self in sessions_here.get() or (self.task is not None and self.task.done())

    def is_behind_backward(self) -> bool:
        """Whether this is one of autograd's own threads, at work for the opener."""
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return False
        context = context_of_backward()
        if context is None:
            return True  # unknown: better to see too much than to miss it
        return self in context.get(sessions_here, ())


sessions_here: ContextVar[frozenset[Opener]] = ContextVar("torchhook_sessions_here", default=frozenset())
"""What stands for the sessions that this context has opened."""


class Nowhere:
    """The keeper of a session that has ended, for a thread that was about to record at that moment."""

    def page(self, number: int, outside: bool) -> Page:
        """A page that no store lists."""
        return Page(number, outside, listed=False)


class ScopeOptions(NamedTuple):
    """What a session is asked to see."""

    shared: bool = False  # passes of all threads and contexts
    recomputed: bool = False  # also the calls that a checkpoint repeats in the backward
    full: bool = False  # sharded values before they are taken apart
    skips_transforms: bool = False  # do not refuse a forward in which taps can see nothing, but ignore it


class Scope:
    """The passes that one session sees."""

    __slots__ = (
        "current",
        "graphs",
        "home",
        "keepers",
        "key",
        "last",
        "opener",
        "options",
        "passes",
        "points",
        "recompute_pass",
        "stop_sites",
        "stopped_by_other",
        "tickets",
        "when",
        "why_unseen",
    )

    def __init__(self, options: ScopeOptions, when: Switch | None = None) -> None:
        self.options = options
        self.when: Switch = when or AlwaysOn()
        self.opener = Opener()
        self.home = self.opener.thread  # here, too, since every hook compares it
        self.points: list[Point] = []  # all that were ever made, by index
        self.keepers: list[Keeper] = []  # each has a page in every pass
        self.stop_sites = 0  # how many sites a pass must see before it can stop
        self.passes: dict[int, Pass] = {}  # those under way, by thread
        self.current: Pass | None = None  # the one of the home thread, for the hooks; None if shared
        self.last: Pass | None = None  # the newest
        self.recompute_pass: Pass | None = None  # has the calls that a checkpoint repeats
        self.why_unseen = ""  # if calls were not seen: in which circumstances they ran
        self.stopped_by_other = False  # whether another session's stop= has ended a pass early
        self.tickets: dict[int, Awaiting] = {}  # for forwards in compiled graphs: where their gradients go
        self.graphs: list[Any] = []  # compiled graphs that hand out their values, by number
        self.key = next(_keys)  # compiled graphs know it by this number
        scopes[self.key] = self

    @property
    def alive(self) -> bool:
        """Whether the session is open."""
        return self.opener.alive

    def close(self) -> None:
        """See nothing any more."""
        self.opener.close()
        self.current = self.recompute_pass = None
        self.passes.clear()
        # The pages have hooks, which have this scope: without them, all is freed without the garbage collector.
        self.keepers = [Nowhere() for _ in self.keepers]
        if self.last is not None:
            self._new_pass(outside=True)
        self.points.clear()
        self.tickets.clear()
        for graph in self.graphs:
            graph.close()
        self.graphs.clear()
        scopes.pop(self.key, None)

    def add_point(self, point: Point) -> int:
        """Add a hooked place, and return its index."""
        self.points.append(point)
        if self.last is not None:  # checked here, since most points are added before any pass
            for pass_ in self._known_passes():
                pass_.call_counts.append(0)
        return len(self.points) - 1

    def ticket_for(self, awaiting: Awaiting) -> int:
        """The number by which a compiled backward finds what waits for its gradients."""
        ticket = next(_tickets)
        self.tickets[ticket] = awaiting
        if len(self.tickets) > _MOST_TICKETS:
            del self.tickets[next(iter(self.tickets))]
        return ticket

    def page_position(self, keeper: Keeper) -> int:
        """The position in ``Pass.pages`` of the page that `keeper` begins with every pass."""
        for position, known in enumerate(self.keepers):
            if known is keeper:
                return position
        self.keepers.append(keeper)
        for pass_ in self._known_passes():
            pass_.pages.append(keeper.page(pass_.number, pass_.outside))
        return len(self.keepers) - 1

    def begin_pass(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """A forward of the model begins; returns whether it is a pass, which `end_pass` must end.

        Inside another forward of the model, in the same thread, it belongs to that pass.
        """
        if not self.when.active or recomputing():  # a checkpoint around the whole model repeats it
            return False
        if not self._sees(module):
            if self.alive:
                self.why_unseen = (
                    "in a thread or context other than the one that attached; pass scope='all' to see those"
                )
            return False
        thread = threading.get_ident()
        mine = self.passes.get(thread)
        if mine is not None and not mine.open_ended:
            return False
        pass_ = self.passes[thread] = self._replica_pass(args) if is_replica(module) else self._new_pass()
        if thread == self.home and not self.options.shared:
            self.current = pass_
        return True

    def end_pass(self) -> None:
        """The pass that this thread began is over, whether or not it raised."""
        thread = threading.get_ident()
        self.passes.pop(thread, None)
        if thread == self.home:
            self.current = None

    def begin_pass_in_graph(self) -> None:
        """A forward begins inside a compiled graph, whose taps see every thread."""
        thread = threading.get_ident()
        mine = self.passes.get(thread)
        if mine is None or mine.open_ended or mine.in_graph:  # one in a graph that never ended has raised
            self.passes[thread] = pass_ = self._new_pass()
            pass_.in_graph = True

    def end_pass_in_graph(self) -> None:
        """That forward is over; a pass that began outside of the graph goes on."""
        mine = self.passes.get(threading.get_ident())
        if mine is not None and mine.in_graph:
            self.end_pass()

    def has_stopped(self) -> bool:
        """Whether the pass that this thread began has seen every site that it had to see."""
        if not self.stop_sites:
            return False
        pass_ = self.passes.get(threading.get_ident())  # None if the session was closed meanwhile
        return pass_ is not None and pass_.stop_sites_left == 0

    def pass_of_call(self, module: nn.Module) -> Pass | None:
        """The pass that a call of `module` belongs to, or None if this session does not see it."""
        if not self.when.active:
            return None
        if recomputing():
            return self._pass_of_recompute()
        return self.pass_here(is_replica(module)) if self._sees(module) else None

    def pass_of_backward(self) -> Pass | None:
        """The pass that a parameter's gradient belongs to, or None if this session does not see it."""
        if self.sees_backward():
            return self.last or self._new_pass(outside=True)
        return None

    def pass_here(self, in_replica: bool = False) -> Pass:
        """The pass that this thread is in, or one for the calls outside of any."""
        thread = threading.get_ident()
        mine = self.passes.get(thread)
        if mine is not None and not (mine.open_ended and self._is_past(mine)):
            return mine
        if self.current is not None and in_replica:  # the session's model holds the replicas
            mine = self._with_pages_of(self.current)
            mine.open_ended = True
        else:
            mine = self._new_pass(outside=True)
        self.passes[thread] = mine
        return mine

    def sees_backward(self) -> bool:
        """Whether this session sees the backward that is running."""
        return self.alive and (self.options.shared or self.opener.is_here() or self.opener.is_behind_backward())

    def _sees(self, module: nn.Module) -> bool:
        options, opener = self.options, self.opener
        if options.skips_transforms and is_transformed():
            return False
        return opener.alive and (options.shared or opener.is_here() or is_replica(module))

    def _pass_of_recompute(self) -> Pass | None:
        """The pass for calls that a checkpoint repeats, None if they are not wanted."""
        if not self.options.recomputed:
            self.why_unseen = self.why_unseen or "while a checkpoint recomputed; pass recomputed=True to see that"
            return None
        if not self.sees_backward():
            return None
        if self.recompute_pass is None or self._is_past(self.recompute_pass):
            self.recompute_pass = self._new_pass(outside=True)
            for page in self.recompute_pass.pages:
                page.recomputed = True
        return self.recompute_pass

    def _known_passes(self) -> set[Pass]:
        """The newest pass and those under way."""
        return set() if self.last is None else {self.last, *self.passes.values()}

    def _is_past(self, pass_: Pass) -> bool:
        return self.last is not None and self.last.number > pass_.number

    def _new_pass(self, outside: bool = False) -> Pass:
        """The next pass. One for calls outside has the number of the pass before it."""
        with _lock:
            number = -1 if self.last is None else self.last.number
            if not outside:
                number += 1
            pages = [keeper.page(number, outside) for keeper in self.keepers]
            pass_ = self.last = Pass(number, len(self.points), pages, self.stop_sites, outside)
        return pass_

    def _replica_pass(self, args: tuple[Any, ...]) -> Pass:
        """Replicas of one DataParallel forward share its number and pages: each has its own device and thread."""
        device = next((tensor.device for _, tensor in leaves(args)), None)
        others = {pass_.device for pass_ in self.passes.values()}
        joins = bool(others) and device not in others
        pass_ = self._with_pages_of(self.last) if joins and self.last else self._new_pass()
        pass_.device = device
        return pass_

    def _with_pages_of(self, pass_: Pass) -> Pass:
        return Pass(pass_.number, len(self.points), list(pass_.pages), self.stop_sites)


scopes: dict[int, Scope] = {}
"""Those of the open sessions, by key."""

_keys = count()
_tickets = count()
_MOST_TICKETS = 10_000  # forwards that may wait for their backward
