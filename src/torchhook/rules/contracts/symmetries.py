"""Contracts about symmetries: changing the input changes the result in the same way, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchhook.captures.agreement.free_runs import Views
from torchhook.core.trees import leaves, mapped
from torchhook.rules.contracts.case import Agreement, Case, Given
from torchhook.rules.contracts.contract import Skip, contract

Change = Callable[[Tensor], Tensor]


@contract("TV110", "Look for code that depends on an order or a direction that the model should not know of.")
def equivariant(case: Case, change: Change | None = None, then: Change | None = None) -> Iterator[Agreement | Skip]:
    """Changing the input changes the result in the same way, or not at all; nodes of a graph may come in any order.

    `change` is applied to every floating-point argument. `then` is what should happen to the result: by default the
    same change, if it has as many dimensions as the argument, and otherwise nothing.
    """
    if change is not None:
        yield _changed(case, change, then)
    elif case.claims.takes_graph and (rows := _nodes(case)):
        yield _renumbered(case, rows)
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


def _renumbered(case: Case, count: int) -> Agreement:
    """The nodes of a graph in another order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    places = order.argsort()

    def renumbered(x: Tensor) -> Tensor:
        if not x.is_floating_point() and x.dim() == 2 and len(x) == 2:  # pairs of nodes
            return places.to(x.device)[x]
        return _ordered(x, order)

    given: Given = mapped(renumbered, case.given)
    return Agreement(
        case.plain,
        case.variant(given),
        "the result changes with the order of the nodes",
        ("in one order", "in another order"),
        lambda a, b, _: [(_ordered(a, order), b)] if a.shape == b.shape else [],
    )


def _ordered(x: Tensor, order: Tensor) -> Tensor:
    """`x` with its rows in another order, if it has one per node; and its columns, if there are as many."""
    for dim in range(min(2, x.dim())):
        if x.shape[dim] == len(order) and (not dim or x.shape[0] == len(order)):
            x = x.index_select(dim, order.to(x.device))
    return x


def _nodes(case: Case) -> int:
    """How many nodes the graph has: the rows of its features."""
    features = [x for _, x in leaves(case.given) if x.dim() == 2 and x.is_floating_point()]
    return len(features[0]) if features else 0
