"""The schedulers of learning rates that a script makes, and whether it steps them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LRScheduler, ReduceLROnPlateau, SequentialLR

from torchhook.training.launch.patches import Guard, patched

_MADE: tuple[type, ...] = (LRScheduler, ReduceLROnPlateau)  # classes whose __init__ calls no other
_STEPPED: tuple[type, ...] = (*_MADE, CosineAnnealingWarmRestarts)  # and those whose step calls no other


class Schedule:
    """A scheduler of an optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self.name = type(scheduler).__name__
        self._scheduler = weakref.ref(scheduler)
        self.begin()

    def begin(self) -> None:
        """Count its steps from now on."""
        scheduler = self._scheduler()
        self.seen = 0
        self._first = 0 if scheduler is None else scheduler.last_epoch

    @property
    def steps(self) -> int:
        """How often it was stepped; one with a method of its own counts its epochs."""
        scheduler = self._scheduler()
        return max(self.seen, 0 if scheduler is None else scheduler.last_epoch - self._first)


class Schedules:
    """All schedulers of the script, by optimizer."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Optimizer, list[Schedule]] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakKeyDictionary[Any, Schedule] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> list[Schedule]:
        """The schedulers that were made for an optimizer."""
        return self._of.get(optimizer, [])

    @contextmanager
    def seen(self, guard: Guard) -> Iterator[None]:
        """See the schedulers that are made, from now on."""
        with ExitStack() as patches:
            for kind in _MADE:
                patches.enter_context(patched(kind, "__init__", after=guard(self._made)))
            patches.enter_context(patched(SequentialLR, "__init__", after=guard(self._joined)))
            for kind in _STEPPED:
                patches.enter_context(patched(kind, "step", before=guard(self._stepped)))
            yield

    def _made(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        schedule = self._known[scheduler] = Schedule(scheduler)  # after its own first step
        self._of.setdefault(scheduler.optimizer, []).append(schedule)

    def _joined(self, sequence: Any, *args: Any, **kwargs: Any) -> None:
        """A sequence has repeated the first step of its parts."""
        for schedule in self.of(sequence.optimizer):
            schedule.begin()

    def _stepped(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        schedule = self._known.get(scheduler)
        if schedule is not None:
            schedule.seen += 1
