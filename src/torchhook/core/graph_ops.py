"""The ops that taps leave in compiled graphs: at run time they hand the tensors to the acts of their point.

They run in order, once per call, and are never optimised away. They return a tensor on the CPU, so that no CUDA graph
replays them. A graph refers to a session by its key, to a point by its index, and to an observer by its number there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchhook.core import graph_values
from torchhook.core.scope import scopes
from torchhook.core.torch_internals import keep_in_order

_ops = torch.library.Library("torchhook", "DEF")
_NOTHING = torch.tensor([-1, -1], device="cpu")


def _see(text: str, tensors: list[Tensor], scope: int, index: int, number: int) -> Tensor:
    known = scopes.get(scope)
    if known is None or not known.alive or not known.when.active:  # a graph from an earlier session, or an idle step
        return _NOTHING
    ticket = known.points[index].observer(number).run(text, tensors)
    return _ticket(scope, ticket)


def _fill(tensors: list[Tensor], key: int, graph: int, position: int) -> Tensor:
    scope = scopes.get(key)
    return _ticket(key, -1 if scope is None else scope.graphs[graph].take(position, tensors))


def _ticket(key: int, number: int) -> Tensor:
    return _NOTHING if number < 0 else torch.tensor([key, number], device="cpu")


def _see_gradient(gradient: Tensor, ticket: Tensor, position: int, leaf: int) -> Tensor:
    key, number = ticket.tolist()
    scope = scopes.get(key)
    if scope is not None and number in scope.tickets:
        scope.tickets[number].receive(position, leaf, gradient)
    return _NOTHING


def _begin(near: Tensor, key: int, graph: int, grad_enabled: bool) -> Tensor:
    scope = scopes.get(key)
    if scope is not None and scope.alive and scope.when.active:
        with torch.set_grad_enabled(grad_enabled):  # inside an op, autograd is always off
            scope.begin_pass_in_graph()
    return _announce(near, key, graph)


def _announce(near: Tensor, key: int, graph: int) -> Tensor:
    return _ticket(key, graph_values.begin(key, graph))


def _end(near: Tensor, key: int) -> Tensor:
    scope = scopes.get(key)
    if scope is not None:
        scope.end_pass_in_graph()
    return _NOTHING


def _noise(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def _define(schema: str, run: Any) -> None:
    """Define an op with a side effect."""
    name = schema.partition("(")[0]
    _ops.define(f"{schema} -> Tensor")
    _ops.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"torchhook::{name}", lambda *_: torch.empty(2, dtype=torch.int64, device="cpu"), lib=_ops
    )
    keep_in_order(f"torchhook::{name}")


_define("see(str text, Tensor[] tensors, int scope, int index, int number)", _see)
_define("fill(Tensor[] tensors, int key, int graph, int position)", _fill)
_define("see_gradient(Tensor gradient, Tensor ticket, int position, int leaf)", _see_gradient)
# These need no tensor, but inductor has to know the device of the kernels around them.
_define("begin(Tensor near, int key, int graph, bool grad_enabled)", _begin)
_define("announce(Tensor near, int key, int graph)", _announce)
_define("end(Tensor near, int key)", _end)

see_op, fill_op = torch.ops.torchhook.see, torch.ops.torchhook.fill
begin_op, announce_op, end_op = torch.ops.torchhook.begin, torch.ops.torchhook.announce, torch.ops.torchhook.end

# A compiler cannot trace a random generator, and need not trace a pure function of a seed.
_ops.define("noise(Tensor like, int seed) -> Tensor")
_ops.impl("noise", _noise, "CompositeExplicitAutograd")
torch.library.register_fake("torchhook::noise", lambda like, seed: torch.empty_like(like), lib=_ops)
