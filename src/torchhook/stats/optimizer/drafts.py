"""Measures the gradients of a whole step, before clipping.

A gradient is measured whenever a backward has accumulated it, into a draft that the next micro-batch replaces. When the
optimizer steps, the draft covers the whole step, and is merged into the statistics.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchhook.core.event import Event
from torchhook.core.sink import Sink
from torchhook.stats import Moments, Stat
from torchhook.stats.cell import Cell
from torchhook.stats.optimizer.notes import NOTES
from torchhook.stats.shelf import Block, Shelf
from torchhook.stats.stat import counted

if TYPE_CHECKING:
    from torchhook.stats.optimizer.steps import Steps


class Drafts(Sink):
    """Measures gradients as they accumulate; each measurement replaces the previous one until the step is complete."""

    lazy = True

    def __init__(self, steps: Steps) -> None:
        self.steps: Steps = weakref.proxy(steps)  # which has this
        self.shelf = Shelf()
        self.whole = Shelf()
        self.cells: dict[str, tuple[Cell, Cell]] = {}  # by path: the draft, and the complete steps

    def add(self, path: str, parameter: Tensor, stats: list[Stat]) -> Cell:
        """Add a parameter; returns the cell of its complete steps."""
        name = f"the param_grad of {path!r}"
        both = Cell(self.shelf, stats, name), Cell(self.whole, stats, name, note=NOTES["param_grad"])
        self._place(*both, parameter)
        self.cells[path] = both
        return both[1]

    def receive(self, event: Event) -> None:
        """Measure one gradient."""
        self.measure(event.path, event.live)

    def measure(self, path: str, gradient: Tensor) -> None:
        """Measure the current gradient of the parameter at `path`."""
        if not self.steps.reduce.clock.active:
            return
        draft, whole = self.cells[path]
        if gradient.device not in draft.places:  # the model was moved
            self._place(draft, whole, gradient)
        if draft.seen:  # in an earlier micro-batch, which this gradient includes
            self._forget(draft)
        draft.update(self.steps.drafted(gradient))
        whole.shape = draft.shape
        if draft.failed:
            whole.stats, whole.failed = draft.stats, draft.failed

    def finish(self, keep: bool) -> dict[str, Tensor]:
        """The step is complete: merge its gradients if `keep`, and return their norms, if moments are collected."""
        norms = self._norms() if keep else {}
        for path, (draft, whole) in self.cells.items():
            if draft.seen and self.steps.parameters[path].grad is None:  # discarded since
                self._forget(draft)
                norms.pop(path, None)
            whole.seen = whole.seen or (keep and draft.seen)
            draft.seen = False
        for block, final in zip(self.shelf, self.whole, strict=True):
            if keep:
                final.merge(block.states[: block.used])
            block.reset()
        return norms

    def _norms(self) -> dict[str, Tensor]:
        rows: dict[Block, Tensor] = {}
        for block in self.shelf:
            if block.stat.key == Moments.name:
                moments = block.stat.settle(block.states[: block.used])
                count, nan, posinf, neginf, _, mean, _, m2, *_ = moments.unbind(1)
                infinite = posinf + neginf
                norms = (m2 + (count - nan - infinite) * mean * mean).sqrt()  # of the finite values
                rows[block] = norms.masked_fill_(infinite > 0, torch.inf).masked_fill_(nan > 0, torch.nan)
        seen = {path: draft for path, (draft, _) in self.cells.items() if draft.seen}
        places = {path: list(draft.places.values())[-1].get(Moments.name) for path, draft in seen.items()}
        return {path: rows[place[0]][place[1]] for path, place in places.items() if place is not None}

    def _forget(self, draft: Cell) -> None:
        for places in draft.places.values():
            for block, number in places.values():
                block.states[number].copy_(block.empty)
        draft.seen = False

    def _place(self, draft: Cell, whole: Cell, x: Tensor) -> None:
        """Give both cells their states at once, so that these are at the same positions."""
        draft.turn_to(counted(x))
        whole.turn_to(counted(x))
