"""Taps inside the graphs that ``torch.compile`` makes.

A hook that is traced must not touch anything that changes: a list that grows or a counter would compile
anew at every call. So it leaves an op in the graph, which at run time hands the tensors over to the acts
of its place: in order, once a call, and never optimised away. Edits are traced like the model itself.
Gradients go through an identity whose backward has such an op.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Mapping
from functools import cache
from itertools import count
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch._library.simple_registry import singleton

from torchhook.core.edit import Editing, refused
from torchhook.core.passes import Pass, scopes
from torchhook.core.tap import Act, Receive, Unknown, is_at_once
from torchhook.core.trees import leaves, put

if TYPE_CHECKING:
    from torchhook.core.hooks import Point

tracing = torch.compiler.is_dynamo_compiling

_ops = torch.library.Library("torchhook", "DEF")
_numbers = count()
_UNKNOWN = Unknown()
_MOST_TICKETS = 10_000  # forwards that may wait for their backward


class Inlay:
    """What a hook leaves in a compiled graph: the acts of its place, and who wants the gradients there.

    The graph knows it by the key of its scope, the index of its point, and its number there.
    """

    __slots__ = ("acts", "address", "catches", "copies", "graded", "point")

    def __init__(self, point: Point, number: int, acts: list[Act], catches: list[Act]) -> None:
        self.point = point
        self.address = point.scope.key, point.index, number
        self.acts = acts
        self.catches = catches
        self.graded = bool(catches)
        self.copies = not all(map(is_at_once, (*acts, *catches)))

    def traced(self, value: Any) -> Any:
        """Put the op into the graph that is being made; the value that continues."""
        tensors: list[Tensor] = []
        text = tensors_in(value, tensors)
        ticket = torch.ops.torchhook.see(text, tensors, *self.address)
        if not self.graded:
            return value
        for number, (address, tensor) in enumerate(list(leaves(value))):
            if tensor.requires_grad:
                value = put(value, address, Graded.apply(tensor, ticket, number))  # type: ignore[no-untyped-call]  # torch's
        return value

    def run(self, text: str, tensors: list[Tensor]) -> int:
        """What the op does: the acts. The number is that of the ticket for the gradients."""
        value = rebuilt(text, list(map(_copied, tensors)) if self.copies else tensors)
        point = self.point
        pass_ = point.scope.under_way()
        is_first = self.address[2] == 0  # which counts the calls
        call = pass_.count(point.index) if is_first else pass_.counts[point.index] - 1
        point.fired = True
        ticket: int = point.guarded(self._act, pass_, call, value)
        return ticket

    def _act(self, pass_: Pass, call: int, value: Any) -> int:
        for act in self.acts:
            act(pass_, call, value, _UNKNOWN)
        if not self.catches:
            return -1
        receives = received(self.catches, pass_, call, value, _UNKNOWN)
        if not receives:
            return -1
        ticket, tickets = next(_numbers), self.point.scope.tickets
        tickets[ticket] = self.point, receives, [address for address, _ in leaves(value)], self.copies
        if len(tickets) > _MOST_TICKETS:
            del tickets[next(iter(tickets))]
        return ticket


def received(catches: list[Act], pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> list[Receive]:
    """Who wants the gradients of `value`."""
    asked = (catch(pass_, call, value, args) for catch in catches)
    return [receive for receive in asked if receive is not None]


def leave_keeping(value: Any, scope: int, index: int) -> None:
    """Leave an op in the graph that is being made which keeps `value`, and nothing more."""
    if isinstance(value, Tensor):
        torch.ops.torchhook.keep(value, scope, index)
        return
    tensors: list[Tensor] = []
    text = tensors_in(value, tensors)
    torch.ops.torchhook.see(text, tensors, scope, index, 0)


class Regrading:
    """An edit of gradients as a step of a compiled graph."""

    def __init__(self, editing: Editing) -> None:
        self.editing = editing

    def traced(self, value: Any) -> Any:
        """The value that continues, whose gradient is edited."""
        meant = self.editing.leaf(value)
        for address, tensor in list(leaves(value)):
            if tensor.requires_grad and (meant is None or address == meant):
                value = put(value, address, Regraded.apply(tensor, self.editing))  # type: ignore[no-untyped-call]  # torch's
        return value


class Retracing:
    """An edit as a step of a compiled graph."""

    def __init__(self, editing: Editing) -> None:
        self.editing = editing

    def traced(self, value: Any) -> Any:
        """The value that continues."""
        if self.editing.edit.by_call:
            raise refused(f"{self.editing.name} differs from call to call, which a compiled graph cannot follow")
        return self.editing.changed(value, 0)


class Impossible:
    """A step that cannot be in a compiled graph."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def traced(self, value: Any) -> Any:
        """Refuse."""
        raise refused(self.reason)


Step = Inlay | Regrading | Retracing | Impossible


class Book:
    """The steps of all hooks, under names of their own.

    The compiler believes that what it reaches through a module of torch's own never changes. What an edit uses
    does (a function has globals), so a hook has but a name, and the steps are reached from here.
    """


book = Book()
traced_names: set[str] = set()  # of steps that are part of some graph


def noted(name: str) -> bool:
    """Note that the steps called `name` become part of a graph: run when that is traced, a constant inside it."""
    traced_names.add(name)
    return True


noted._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what torch.compiler.assume_constant_result does


def entered(steps: tuple[Step, ...]) -> str:
    """The name under which `steps` are in the book from now on."""
    name = f"steps_{next(_numbers)}"
    setattr(book, name, steps)
    return name


def followed(name: str, value: Any) -> Any:
    """Trace the steps called `name` one after the other; the value that continues."""
    noted(name)
    for step in getattr(book, name):
        value = step.traced(value)
    return value


def forget(name: str) -> None:
    """The steps called `name` are no more."""
    delattr(book, name)
    traced_names.discard(name)


class Graded(torch.autograd.Function):
    """An identity that tells of the gradient. A copy, which the compiler leaves out where nobody overwrites it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: Tensor, leaf: int) -> Tensor:
        ctx.save_for_backward(ticket)
        ctx.leaf = leaf
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ticket,) = ctx.saved_tensors
        torch.ops.torchhook.see_gradient(gradient, ticket, ctx.leaf)
        return gradient, None, None


class Regraded(torch.autograd.Function):
    """An identity that edits the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, editing: Editing) -> Tensor:
        ctx.editing = editing
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.editing.gradient(gradient, 0), None


def fresh(function: Any) -> Any:
    """`function` with a code object of its own, under which nothing was compiled yet."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def tensors_in(value: Any, found: list[Tensor]) -> str:
    """The shape of `value` as text, which may stand in a graph; its tensors are appended to `found`.

    >>> tensors_in((torch.ones(1), None), [])
    "('builtins:tuple', [(0, 0), (1, None)])"
    """
    if isinstance(value, Tensor):
        found.append(value)
        return str(len(found) - 1)
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        items = [f"({key!r}, {tensors_in(item, found)})" for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        items = [f"({key}, {tensors_in(item, found)})" for key, item in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        items = [f"({name!r}, {tensors_in(getattr(value, name), found)})" for name in names]
    else:
        return "None"
    return f"('{type(value).__module__}:{type(value).__qualname__}', [{', '.join(items)}])"


def rebuilt(text: str, tensors: list[Tensor]) -> Any:
    """The value whose shape is `text`, with `tensors`; what was no tensor is None.

    >>> rebuilt("('builtins:dict', [('a', 0), ('b', None)])", ["tensor"])
    {'a': 'tensor', 'b': None}
    """
    return tensors[0] if text == "0" else _built(_parsed(text), tensors)


_parsed = cache(ast.literal_eval)  # a program has as many as its graphs have places


def _built(shape: Any, tensors: list[Tensor]) -> Any:
    if shape is None or isinstance(shape, int):
        return None if shape is None else tensors[shape]
    name, fields = shape
    items = {key: _built(item, tensors) for key, item in fields}
    kind = _class(name)
    if kind is None:
        return items
    in_sequence = issubclass(kind, (tuple, list))
    try:
        if in_sequence:
            return tuple.__new__(kind, items.values()) if issubclass(kind, tuple) else kind(items.values())
        with_fields = dataclasses.is_dataclass(kind)
        return kind(**items) if with_fields else kind(items)
    except TypeError:  # a class with ideas of its own
        return _torchs(kind, list(items.values())) if in_sequence else items


def _torchs(kind: Any, items: list[Any]) -> Any:
    """One of torch's own tuples, such as that of ``torch.max``, or else a plain one."""
    return kind(items) if kind.__module__ == "torch.return_types" else tuple(items)


@cache
def _class(name: str) -> Any:
    """The class called `name`, None if it lives inside of a function."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _keep(tensor: Tensor, scope: int, index: int) -> Tensor:
    known = scopes.get(scope)
    if known is not None and known.alive:
        hook: Any = known.points[index].hook
        hook.point.fired = True
        known.under_way().keep((hook.site, None, _copied(tensor)))
    return _NOTHING


def _see(text: str, tensors: list[Tensor], scope: int, index: int, number: int) -> Tensor:
    known = scopes.get(scope)
    if known is None or not known.alive:  # a graph from before, in which nobody is interested now
        return _NOTHING
    ticket = known.points[index].inlay(number).run(text, tensors)
    return _NOTHING if ticket < 0 else torch.tensor([scope, ticket], device="cpu")


def _see_gradient(gradient: Tensor, ticket: Tensor, leaf: int) -> Tensor:
    key, number = ticket.tolist()
    scope = scopes.get(key)
    if scope is not None and number in scope.tickets:
        point, receives, addresses, copies = scope.tickets[number]
        point.receive(receives, leaf, addresses[leaf], _copied(gradient) if copies else gradient)
    return _NOTHING


def _begin(near: Tensor, key: int, graded: bool) -> Tensor:
    scope = scopes.get(key)
    if scope is not None and scope.alive:
        with torch.set_grad_enabled(graded):  # which it is not inside an op
            scope.begin_in_graph()
    return _NOTHING


def _end(near: Tensor, key: int) -> Tensor:
    scope = scopes.get(key)
    if scope is not None:
        scope.end_in_graph()
    return _NOTHING


def _copied(tensor: Tensor) -> Tensor:
    """A copy, since the graph goes on using this memory for something else."""
    return tensor.detach().clone() if tensor.requires_grad else tensor.clone()


def _define(schema: str, run: Any) -> None:
    """An op that is run in order and never left out. What it returns is on the CPU: no CUDA graph replays it."""
    name = schema.partition("(")[0]
    _ops.define(f"{schema} -> Tensor")
    _ops.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"torchhook::{name}", lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"), lib=_ops
    )
    # What torch.library says in public, without importing the compiler.
    singleton.find(f"torchhook::{name}").effect.register(EffectType.ORDERED)


_NOTHING = torch.tensor([-1, -1], device="cpu")
_define("keep(Tensor tensor, int scope, int index)", _keep)
_define("see(str text, Tensor[] tensors, int scope, int index, int number)", _see)
_define("see_gradient(Tensor gradient, Tensor ticket, int leaf)", _see_gradient)
# These need no tensor, but inductor has to know on which device they stand between its kernels.
_define("begin(Tensor near, int key, bool graded)", _begin)
_define("end(Tensor near, int key)", _end)


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


# No compiler can follow a generator; a pure function of a seed it need not follow.
_ops.define("noise(Tensor like, int seed) -> Tensor")
_ops.impl("noise", _noise, "CompositeExplicitAutograd")
torch.library.register_fake("torchhook::noise", lambda like, seed: torch.empty_like(like), lib=_ops)
