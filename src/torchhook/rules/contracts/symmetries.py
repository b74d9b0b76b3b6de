"""Contracts about symmetries: changing the input changes the result in the same way, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from torchhook.captures.agreement.free_runs import Views
from torchhook.core.trees import leaves, mapped
from torchhook.rules.contracts.case import Agreement, Case, Given
from torchhook.rules.contracts.claims import GRAPHS
from torchhook.rules.contracts.contract import Skip, contract

Change = Callable[[Tensor], Tensor]
_PAIRS = ("edge_index", "edges", "graph")  # arguments that may have pairs of nodes
_MOST = 3  # dimensions of a value that may have the entries of a set


@contract("TV110", "Look for code that depends on an order or a direction that the model should not know of.")
def equivariant(
    case: Case, change: Change | None = None, then: Change | None = None, set_dim: int | None = None
) -> Iterator[Agreement | Skip]:
    """Changing the input changes the result in the same way, or not at all; nodes and sets may come in any order.

    `change` is applied to every floating-point argument. `then` is what should happen to the result: by default the
    same change, if it has as many dimensions as the argument, and otherwise nothing. `set_dim` is a dimension whose
    entries are a set; models whose class is called so have it after that of the samples.
    """
    if change is not None:
        yield _changed(case, change, then)
        return
    dim = case.claims.set_dim if set_dim is None else set_dim
    if set_dim is None and case.claims.takes_graph:
        nodes = _nodes(case)
        yield Skip("the features of its nodes were not found") if nodes is None else _renumbered(case, *nodes)
    elif dim is not None and (main := _main(case, dim)) is not None:
        yield _shuffled(case, main, dim)
    else:
        yield Skip("no symmetry was asked for; pass contracts.equivariant(change)")


def _changed(case: Case, change: Change, then: Change | None) -> Agreement:
    dims = {x.dim() for _, x in leaves(case.given) if x.is_floating_point()}

    def pair(a: Tensor, b: Tensor, _: Tensor | None) -> Views:
        try:
            expected = then(a) if then is not None else change(a) if a.dim() in dims else a
        except (IndexError, RuntimeError):  # it does not fit a value inside the model
            return []
        return [(expected, b)] if expected.shape == b.shape else []

    given = mapped(lambda x: change(x) if x.is_floating_point() else x, case.given)
    said = f"the result does not follow {getattr(change, '__name__', 'a change')} of the input"
    return Agreement(case.plain, case.variant(given), said, ("before the change", "after it"), pair)


def _renumbered(case: Case, count: int, dim: int) -> Agreement:
    """The nodes of a graph in another order: `count` of them, along `dim` of their features."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    places = order.argsort()

    def renumbered(name: str, x: Tensor) -> Tensor:
        if not x.is_floating_point() and x.dim() == 2 and name in _PAIRS and 2 in x.shape:
            return places.to(x.device)[x]
        if name.startswith("edge") or x.dim() <= dim or x.shape[dim] != count:
            return x
        x = _along(x, dim, order)
        return _along(x, dim + 1, order) if name in GRAPHS and x.shape[dim + 1 :] == (count,) else x

    given: Given = {name: mapped(partial(renumbered, name), value) for name, value in case.given.items()}
    return Agreement(
        case.plain,
        case.variant(given),
        "the result changes with the order of the nodes",
        ("in one order", "in another order"),
        partial(_in_order, order),
    )


def _shuffled(case: Case, main: Tensor, dim: int) -> Agreement:
    """The entries of a set in another order; so is whatever belongs to them."""
    order = torch.randperm(main.shape[dim], generator=torch.Generator().manual_seed(0))

    def shuffled(x: Tensor) -> Tensor:
        return _along(x, dim, order) if x.shape[: dim + 1] == main.shape[: dim + 1] else x

    said, names = "the result changes with the order of a set", ("in one order", "in another order")
    variant = case.variant(mapped(shuffled, case.given))
    return Agreement(case.plain, variant, said, names, partial(_in_order, order))


def _in_order(order: Tensor, a: Tensor, b: Tensor, _: Tensor | None) -> Views:
    """A pairing: any dimension of the size of `order` may have the entries, or be something else."""
    if a.shape != b.shape:
        return []
    views = [a]
    for dim in [dim for dim in range(a.dim()) if a.shape[dim] == len(order)][:_MOST]:
        views += [_along(view, dim, order) for view in views]
    return [(view, b) for view in views]


def _along(x: Tensor, dim: int, order: Tensor) -> Tensor:
    return x.index_select(dim, order.to(x.device))


def _main(case: Case, dim: int) -> Tensor | None:
    """The first argument that has entries along a dimension."""
    return next(
        (x for _, x in leaves(case.given) if x.is_floating_point() and x.dim() > dim and x.shape[dim] > 1), None
    )


def _nodes(case: Case) -> tuple[int, int] | None:
    """How many nodes the graph has, and the dimension of their features that counts them: the second in a batch."""
    named = [(name, x) for name, x in case.given.items() if isinstance(x, Tensor) and x.dim() in (2, 3)]
    features = [x for name, x in named if name not in GRAPHS and not name.startswith("edge")]
    return next(((x.shape[x.dim() - 2], x.dim() - 2) for x in features), None)
