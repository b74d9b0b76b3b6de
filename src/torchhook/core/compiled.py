"""Taps inside the graphs that ``torch.compile`` makes.

A hook that is traced must not touch anything that changes: a list that grows, or a counter, would cause a recompilation
at every call. And torch checks again at every call whatever else it touched, so a hook has only numbers and a name,
and what these stand for are constants of the graph.

A hook leaves steps in the graph. A value that is only kept is handed out by the graph (`graph_values`), any other
observer becomes an op (`graph_ops`), an edit is traced like the model itself, and a gradient is seen by a hook that
leaves such an op in the graph of the backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.container_text import are_plain, rebuilt, tensors_in
from torchhook.core.edit import Editing, refused
from torchhook.core.graph_ops import announce_op, begin_op, end_op, fill_op, see_op
from torchhook.core.graph_values import (
    announce,
    box_of,
    boxes,
    graph_of,
    in_body,
    is_announced,
    is_first_value,
    next_position,
    observes,
)
from torchhook.core.hooks.tensors import watched
from torchhook.core.passes import Pass
from torchhook.core.sink import UNKNOWN, Act, Receive
from torchhook.core.torch_internals import DROPOUTS, TESTED, can_order_ops, marked_constant
from torchhook.core.trees import Address, leaves, put

if TYPE_CHECKING:
    from torchhook.core.hooks.point import Point

tracing = torch.compiler.is_dynamo_compiling

_numbers = count()
_NO_ORDER = (
    "taps inside compiled graphs need a private part of torch that this version lacks (torchhook was tested with torch"
    f" {TESTED}); tap the uncompiled model"
)


class ObserveStep:
    """The observers at a point as a step of a compiled graph: acts on the value, and acts that want its gradient."""

    __slots__ = ("acts", "catches", "index", "key", "number", "of_inputs", "path", "point", "wants_gradients")
    kind = "observe"

    def __init__(self, point: Point, number: int, acts: list[Act], catches: list[Act], of_inputs: bool = False) -> None:
        self.point = point
        self.path = point.path
        self.key, self.index, self.number = point.scope.key, point.index, number  # how the graph refers to it
        self.acts = acts
        self.catches = catches
        self.wants_gradients = bool(catches)
        self.of_inputs = of_inputs  # whose gradient is that through this module alone

    def run(self, text: str, tensors: list[Tensor]) -> int:
        """Run the acts when the op runs; returns the ticket by which the backward finds them, -1 for none."""
        value = rebuilt(text, tensors)
        point = self.point
        pass_ = point.scope.pass_here()
        is_first = self.number == 0  # the first observer at a point counts its calls
        call = pass_.next_call(point.index) if is_first else pass_.call_counts[point.index] - 1
        point.fired = True
        ticket: int = point.guarded(self._act, pass_, call, value)
        return ticket

    def _act(self, pass_: Pass, call: int, value: Any) -> int:
        for act in self.acts:
            act(pass_, call, value, UNKNOWN)
        receives = received(self.catches, pass_, call, value, UNKNOWN)
        if not receives:
            return -1
        return self.point.scope.ticket_for(Receivers(self.point, receives, [address for address, _ in leaves(value)]))


class Receivers(NamedTuple):
    """Who takes the gradients of a value that was seen in a graph."""

    point: Point
    receives: list[Receive]
    addresses: list[Address]

    def receive(self, position: int, leaf: int, gradient: Tensor) -> None:
        """Hand on the gradient of one tensor."""
        self.point.receive(self.receives, leaf, self.addresses[leaf], gradient)


class EditStep:
    """An edit as a step of a compiled graph."""

    __slots__ = ("by_call", "edit", "known_as", "name", "site")
    kind = "edit"

    def __init__(self, editing: Editing) -> None:
        self.edit = editing.edit
        self.by_call = self.edit.by_call
        self.known_as = f"edit_{id(self.edit)}"  # among the steps
        self.name = editing.name
        self.site = editing.site


class GradientEditStep:
    """An edit of gradients as a step of a compiled graph."""

    kind = ""

    def __init__(self, editing: Editing) -> None:
        self.editing = editing

    def traced(self, value: Any) -> Any:
        """The value to continue with, whose gradient is edited."""
        meant = self.editing.leaf(value)
        for address, tensor in list(leaves(value)):
            if tensor.requires_grad and (meant is None or address == meant):
                value = put(value, address, _Edited.apply(tensor, self.editing))  # type: ignore[no-untyped-call]  # torch's
        return value


class RefusedStep:
    """Stands for an act that cannot be a step of a compiled graph."""

    __slots__ = ("reason",)
    kind = ""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def traced(self, value: Any) -> Any:
        """Raise the reason."""
        raise refused(self.reason)


GraphStep = ObserveStep | EditStep | GradientEditStep | RefusedStep


def received(catches: list[Act], pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> list[Receive]:
    """The functions that take the gradients of `value`."""
    asked = (catch(pass_, call, value, args) for catch in catches)
    return [receive for receive in asked if receive is not None]


def leave(value: Any, key: int, index: int, observer: int) -> tuple[Tensor, int]:
    """Let the graph that is being made show `value`; returns the ticket for its gradients, and its position there."""
    if not can_order_ops:
        raise refused(_NO_ORDER)
    tensors: list[Tensor] = []
    text = tensors_in(value, tensors)
    graph = graph_of(key) if are_plain(tensors) else -1
    by_op = graph < 0 or in_body()
    if graph < 0 or (by_op and not is_announced(key, graph)):
        return see_op(text, tensors, key, index, observer), 0
    position = next_position(key, graph, index, observer, text, len(tensors))
    if by_op:
        return fill_op(tensors, key, graph, position), position
    box = getattr(boxes, box_of(key, graph))
    if not is_announced(key, graph):
        announce(key, graph)
        box.ticket = announce_op(tensors[0], key, graph)
    value = position, tuple(tensor.detach().clone() for tensor in tensors)
    box.values = (value,) if is_first_value(key, graph) else (*box.values, value)
    return box.ticket, position


@marked_constant
def as_number(text: str) -> int:
    """A number as a constant of the graph."""
    return int(text)


def begin(near: Tensor, key: int) -> None:
    """Let the graph that is being made say that a pass begins. Edits alone need none."""
    if not observes(key):
        return
    graph = graph_of(key)
    ticket = begin_op(near, key, graph, torch.is_grad_enabled())
    if graph >= 0:
        announce(key, graph)
        getattr(boxes, box_of(key, graph)).ticket = ticket


def end(near: Tensor, key: int) -> None:
    """Let the graph say that the pass is over."""
    if observes(key):
        end_op(near, key)


class StepsByName:
    """The steps of all hooks, as attributes, and the edits in them.

    The compiler assumes that objects it reaches through one of torch's modules never change. What an edit uses may
    change (a function has globals), so a hook only has a name, and finds the edit here: once, if many sites share it.
    """


_steps = StepsByName()
_uses: Counter[str] = Counter()  # in how many steps an edit is
_makers: dict[str, Callable[[], tuple[GraphStep, ...]]] = {}  # by name: most steps are never part of a graph


@marked_constant
def _note(name: str) -> int:
    """Note that the steps called `name` became part of a graph; returns how many they are."""
    torch.compiler.allow_in_graph(watched)  # only now, since it imports the compiler
    if not hasattr(_steps, name):
        setattr(_steps, name, _makers[name]())
        for step in edits_in(name):
            setattr(_steps, step.known_as, step.edit)
            _uses[step.known_as] += 1
    return len(getattr(_steps, name))


@marked_constant
def _fact(name: str, number: int, attribute: str) -> Any:
    """What a graph needs to know of a step, as a constant."""
    return getattr(getattr(_steps, name)[number], attribute)


def entered(make: Callable[[], tuple[GraphStep, ...]]) -> str:
    """Let graphs know the steps that `make` makes, once they need them; returns their name."""
    name = f"steps_{next(_numbers)}"
    _makers[name] = make
    return name


def steps_in_graphs(name: str) -> tuple[GraphStep, ...]:
    """The steps called `name`; none if no graph has them."""
    return getattr(_steps, name, ())


def edits_in(name: str) -> list[EditStep]:
    """Those of them that are edits."""
    return [step for step in steps_in_graphs(name) if isinstance(step, EditStep)]


def returned(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The output of a module as it is without a compiler, in whose graphs a dropout that is off returns a copy."""
    is_off = isinstance(module, DROPOUTS) and not (module.training and module.p)
    return args[0] if is_off and args else output


def followed(name: str, value: Any) -> Any:
    """Trace the steps called `name` one after the other; returns the value to continue with."""
    for number in range(_note(name)):
        kind = _fact(name, number, "kind")
        if kind == "observe":
            value = _shown(name, number, value)
        elif kind == "edit":
            value = _edited(name, number, value)
        else:
            value = getattr(_steps, name)[number].traced(value)
    return value


def _shown(name: str, step: int, value: Any) -> Any:
    """Let observers see `value`; returns the value to continue with."""
    ticket, position = leave(value, _fact(name, step, "key"), _fact(name, step, "index"), _fact(name, step, "number"))
    if not _fact(name, step, "wants_gradients"):
        return value
    of_inputs, path = _fact(name, step, "of_inputs"), _fact(name, step, "path")
    for number, (address, tensor) in enumerate(list(leaves(value))):
        if tensor.requires_grad:
            is_apart = of_inputs or tensor.is_leaf
            value = put(value, address, watched(tensor, ticket, position, number, is_apart, path))
    return value


def _edited(name: str, step: int, value: Any) -> Any:
    """The value to continue with after an edit."""
    title = _fact(name, step, "name")
    if _fact(name, step, "by_call"):
        raise refused(f"{title} differs from call to call, which a compiled graph cannot follow")
    edit = getattr(_steps, _fact(name, step, "known_as"))
    return Editing(edit, _fact(name, step, "site"), title).changed(value, 0)


def followed_by(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """The same for the output of a module."""
    output = returned(module, args, output)
    value = followed(name, output)
    return recomputable(value) if _leaves_op(name) and _is_new(args, output) else value


@marked_constant
def _leaves_op(name: str) -> bool:
    """Whether one of the steps called `name` is an op in the graph."""
    return any(isinstance(step, ObserveStep) and graph_of(step.key) < 0 for step in getattr(_steps, name))


def _is_new(args: tuple[Any, ...], output: Any) -> bool:
    """Whether no tensor of an output is one of the inputs."""
    inputs = [tensor for _, tensor in leaves(args)]
    return all(tensor is not other for _, tensor in leaves(output) for other in inputs)


def recomputable(value: Any) -> Any:
    """What the model continues with after an op has seen `value`: the same memory under another name.

    What is computed from a value both before and after an op, compilers do not compute again in the backward, but keep,
    often in a larger dtype. By the other name, nothing is computed before the op.
    """
    for address, tensor in list(leaves(value)):
        if tensor.requires_grad:
            value = put(value, address, tensor.expand_as(tensor))
    return value


def forget(name: str) -> None:
    """Drop the steps called `name`, and the edits that no others share."""
    for step in edits_in(name):
        _uses[step.known_as] -= 1
        if not _uses[step.known_as]:
            del _uses[step.known_as]
            delattr(_steps, step.known_as)
    if hasattr(_steps, name):
        delattr(_steps, name)
    del _makers[name]


class _Edited(torch.autograd.Function):
    """An identity that edits its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, editing: Editing) -> Tensor:
        ctx.editing = editing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.editing.gradient(gradient, 0), None


def fresh(function: Any) -> Any:
    """`function` with a new code object, for which nothing was compiled yet."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
