"""The schedulers of learning rates that a script makes, and whether it steps them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchhook.training.launch.patches import Guard, patched


class Schedule:
    """A scheduler of an optimizer."""

    def __init__(self, scheduler: Any) -> None:
        self.name = type(scheduler).__name__
        self._scheduler = weakref.ref(scheduler)
        self._first = scheduler.last_epoch
        self._steps = 0

    @property
    def steps(self) -> int | None:
        """How often it was stepped; None if it is gone before we have seen a step."""
        scheduler = self._scheduler()
        if scheduler is not None:
            self._steps = scheduler.last_epoch - self._first
        return None if scheduler is None and not self._steps else self._steps


class Schedules:
    """All schedulers of the script, by optimizer."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[Optimizer, list[Schedule]] = weakref.WeakKeyDictionary()

    def of(self, optimizer: Optimizer) -> list[Schedule]:
        """The schedulers that were made for an optimizer."""
        return self._of.get(optimizer, [])

    @contextmanager
    def seen(self, guard: Guard) -> Iterator[None]:
        """See the schedulers that are made, from now on."""
        with ExitStack() as patches:
            for kind in (LRScheduler, ReduceLROnPlateau):  # the latter does not call the former
                patches.enter_context(patched(kind, "__init__", after=guard(self._made)))
            yield

    def _made(self, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        self._of.setdefault(scheduler.optimizer, []).append(Schedule(scheduler))
