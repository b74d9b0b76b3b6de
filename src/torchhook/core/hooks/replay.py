"""Forwards that a checkpoint repeats in the backward: edits act again, and late gradients are caught.

A reentrant checkpoint runs its forward without a graph first, and repeats it with one in the backward. Taps that want
the gradients of the first run wait here for the second.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from torchhook.core.edit import Editing
from torchhook.core.errors import TapError
from torchhook.core.sink import Act, Receive
from torchhook.core.site import Site
from torchhook.core.trees import leaves

_MOST_AWAITED = 1_000


class Awaited:
    """Calls in the first run of a checkpoint, whose gradients only the second run has.

    A repeated call is recognised by a sample of its values.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: deque[tuple[Tensor | None, list[Receive]]] = deque(maxlen=_MOST_AWAITED)

    def put(self, value: Any, receives: list[Receive]) -> None:
        """Note a call of the first run."""
        self.calls.append((_sample(value), receives))

    def take(self, value: Any) -> list[Receive] | None:
        """What waits for the gradients of the call that is now repeated with `value`; None if nothing does."""
        if not self.calls:
            return None
        sample = _sample(value)
        for position in range(len(self.calls) - 1, -1, -1):  # checkpoints are repeated from last to first
            known, receives = self.calls[position]
            only_one = len(self.calls) == 1  # no need to compare, which would wait for an accelerator
            if only_one or (known is not None and sample is not None and torch.equal(known, sample)):
                del self.calls[position]
                return receives
        return None


def repeatable(act: Act, site: Site) -> Act:
    """The act of an edit for a call that a checkpoint repeats; raises if it depends on the pass or on the call."""
    if isinstance(act, Editing) and not act.edit.by_call:
        return act
    raise TapError(
        f"the edit at the {site} has a schedule or differs from call to call, but a checkpoint does not say which call"
        " it repeats; use the same edit for all calls and passes, or turn checkpointing off"
    )


def _sample(value: Any) -> Tensor | None:
    """A few of the numbers in `value`."""
    row: Tensor | None = next((tensor.detach() for _, tensor in leaves(value)), None)
    while row is not None and row.dim() > 1 and row.numel():
        row = row[0]
    return row if row is None or not row.dim() else row[:64].clone()
