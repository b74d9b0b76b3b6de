"""Values that a compiled graph hands out as further results of its own, so that keeping them costs no op.

The hooks of a session that only keeps values assign them to an attribute of a `Box`. The compiler makes them outputs of
the graph, and assigns them when the graph has run. When it begins to run, an op puts a `Promise` for each value onto
the page of the pass, in execution order; the promise looks into the box when it is read. Before the graph runs once
more, what is still in the box goes to the promises that wait for it. If it raises, it hands out nothing.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from torchhook.core.container_text import rebuilt
from torchhook.core.event import copied
from torchhook.core.kept_gradients import KeepGradient, KeptGradients
from torchhook.core.page import Keep
from torchhook.core.passes import Pass
from torchhook.core.scope import Scope, scopes
from torchhook.core.snapshot import Held
from torchhook.core.torch_internals import graph_under_trace, in_body_under_trace, marked_constant

if TYPE_CHECKING:
    from torchhook.core.hooks.point import Point


class Box:
    """Takes what one graph hands out: `values`, each with its position, and the `ticket` of their gradients."""


class Boxes:
    """The boxes of all graphs, as attributes: where the compiler finds them, and notices that one has gone."""


boxes = Boxes()
_numbers = count()


class HandedOut(NamedTuple):
    """One value that a graph hands out, and who keeps it."""

    point: int  # its index
    text: str  # the structure of the value
    tensors: int  # how many it has
    acts: tuple[Keep, ...]
    catches: tuple[KeepGradient, ...]  # who keeps its gradients

    def promise(self, pass_: Pass, promise: Promise) -> list[weakref.ref[KeptGradients]]:
        """Put `promise` onto the page, and the places of the gradients, which are returned."""
        call = pass_.next_call(self.point)
        for act in self.acts:
            pass_.pages[act.page].put(act.site, call, promise)
        return [catch.expect(pass_, call, KeptGradients.in_graph(self.text, self.tensors)) for catch in self.catches]


class Promise(Held):
    """A value that a graph hands out when it has run."""

    __slots__ = ("__weakref__", "graph", "text", "value")

    def __init__(self, graph: Graph, text: str) -> None:
        self.graph: Graph | None = graph  # None once nothing more will come
        self.text = text
        self.value: Any = None

    def take(self, tensors: tuple[Tensor, ...] | None) -> None:
        """The value has come, or will never come."""
        self.graph = None
        self.value = None if tensors is None else rebuilt(self.text, tensors)

    def came(self) -> bool:
        """Whether the graph got as far as this value."""
        if self.graph is not None:
            self.graph.settle()
        return self.value is not None

    def peek(self) -> Any:
        self.came()
        return self.value

    read = peek


class AwaitingRun:
    """The gradients that one run of a graph will bring, by the position of their value."""

    def __init__(self, points: list[Point], gradients: list[list[weakref.ref[KeptGradients]]]) -> None:
        self.points = points
        self.gradients = gradients

    def receive(self, position: int, leaf: int, gradient: Tensor) -> None:
        """Keep the gradient of one tensor."""
        self.points[position].saw_gradient = True
        for reference in self.gradients[position]:
            if (gradients := reference()) is not None:
                gradients.found[leaf] = None  # a second backward replaces the first
                gradients.found[leaf] = copied(gradient)


class Graph:
    """A compiled graph, as far as one session keeps what flows in it."""

    def __init__(self, number: int, traced: object) -> None:
        self.number = number  # among those of its scope
        self.traced = weakref.ref(traced)  # what the compiler knows of it while it traces
        self.name = f"box_{next(_numbers)}"
        self.box = Box()
        self.is_announced = False  # whether the op that begins a run is in it
        self.has_values = False  # whether it hands out any
        self.has_run = False
        self.handed_out: list[HandedOut] = []
        self.promises: list[weakref.ref[Promise]] = []  # those of the newest run
        self.ticket = -1  # of the newest run
        setattr(boxes, self.name, self.box)

    def begin(self, scope: Scope, pass_: Pass) -> int:
        """A run begins: promise its values; returns the ticket of the gradients to come, -1 for none."""
        self.settle(for_good=True)
        gradients: list[list[weakref.ref[KeptGradients]]] = []
        for each in self.handed_out:
            promise = Promise(self, each.text)
            self.promises.append(weakref.ref(promise))
            gradients.append(each.promise(pass_, promise))
        if not self.has_run:
            self.has_run = True
            for each in self.handed_out:
                scope.points[each.point].fired = True
        self.ticket = -1
        if any(gradients):
            points = [scope.points[each.point] for each in self.handed_out]
            self.ticket = scope.ticket_for(AwaitingRun(points, gradients))
        return self.ticket

    def take(self, position: int, tensors: list[Tensor]) -> int:
        """A value inside the body of another op was seen, which the graph cannot return; returns the ticket."""
        promise = self.promises[position]()
        if promise is not None:
            promise.take(tuple(map(copied, tensors)))
        return self.ticket

    def settle(self, for_good: bool = False) -> None:
        """Hand what is in the box to the promises; `for_good` if nothing more will come."""
        values = vars(self.box).pop("values", ())
        for position, tensors in values:
            if (promise := self.promises[position]()) is not None:
                promise.take(tensors)
        if for_good:
            if len(values) < len(self.promises):
                self.give_up()
            self.promises.clear()

    def give_up(self) -> None:
        """Tell the promises that still wait that nothing will come."""
        for promise in (reference() for reference in self.promises):
            if promise is not None and promise.graph is not None:
                promise.take(None)

    def close(self) -> None:
        """The session has ended: the graph must not run any more."""
        self.settle(for_good=True)
        delattr(boxes, self.name)


def begin(key: int, number: int) -> int:
    """A graph of the scope with this key begins to run; returns the ticket of its gradients, -1 for none."""
    scope = scopes.get(key)
    if scope is None or not scope.alive or number < 0:
        return -1
    graph: Graph = scope.graphs[number]
    return graph.begin(scope, scope.pass_here())


# What follows runs while a compiler traces; what it returns is a constant of the graph.


@marked_constant
def observes(key: int) -> bool:
    """Whether a session does more than edit, so that it needs passes."""
    scope = scopes.get(key)
    return scope is not None and any(not tap.edits for point in scope.points for tap, _, _ in point.bound)


@marked_constant
def graph_of(key: int) -> int:
    """The number of the graph that is being traced, or -1 if it hands out no values."""
    scope, traced = scopes.get(key), graph_under_trace()
    if scope is None or traced is None or scope.options.shared or not _only_keeps(scope):
        return -1
    for graph in reversed(scope.graphs):
        if graph.traced() is traced:
            return int(graph.number)
    scope.graphs.append(Graph(len(scope.graphs), traced))
    return len(scope.graphs) - 1


@marked_constant
def box_of(key: int, number: int) -> str:
    """The name of a graph's box."""
    return str(scopes[key].graphs[number].name)


@marked_constant
def is_announced(key: int, number: int) -> bool:
    """Whether the op that begins a run is in the graph already."""
    return bool(scopes[key].graphs[number].is_announced)


@marked_constant
def announce(key: int, number: int) -> None:
    """The op that begins a run is put into the graph now."""
    scopes[key].graphs[number].is_announced = True


@marked_constant
def is_first_value(key: int, number: int) -> bool:
    """Whether the graph hands out nothing so far; from now on it does."""
    graph = scopes[key].graphs[number]
    had_values, graph.has_values = graph.has_values, True
    return not had_values


@marked_constant
def in_body() -> bool:
    """Whether the body of an op is being traced, such as that of a checkpoint, which has no results of its own."""
    return in_body_under_trace()


@marked_constant
def next_position(key: int, number: int, index: int, observer: int, text: str, tensors: int) -> int:
    """The position of one more value that the graph hands out."""
    scope = scopes[key]
    step = scope.points[index].observer(observer)
    handed_out: list[HandedOut] = scope.graphs[number].handed_out
    acts = tuple(act for act in step.acts if isinstance(act, Keep))
    catches = tuple(catch for catch in step.catches if isinstance(catch, KeepGradient))
    handed_out.append(HandedOut(index, text, tensors, acts, catches))
    return len(handed_out) - 1


def _only_keeps(scope: Scope) -> bool:
    """Whether no tap but edits does more than keep: only then is the order of what is kept that of execution."""
    bound = [(tap, act) for point in scope.points for tap, _, act in point.bound]
    return all(tap.edits or isinstance(act, (Keep, KeepGradient)) for tap, act in bound)
