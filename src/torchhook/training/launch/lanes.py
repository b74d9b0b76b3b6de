"""What one thread of the script has done since its last step, so that several can train at the same time."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchhook.training.launch.feeding import Feeder
from torchhook.training.monitor import Terms

if TYPE_CHECKING:
    from torchhook.training.launch.by_hand import Suspicion

_BACKWARDS = 1000  # losses that are kept between two steps, at most


class Lane:
    """One thread of the script: its losses, what they compare, and the batches that it drew, until it steps.

    `leaves` are the ids of the tensors that the losses depend on. They are known only where nothing is trained yet, as
    far as we can tell: another thread may step after these backwards.
    """

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())
        self.losses: deque[Tensor] = deque(maxlen=_BACKWARDS)
        self.before: list[Tensor] = []  # losses from before the step began
        self.terms: list[Terms] = []  # what they compare
        self.leaves: set[int] = set()
        self.drawn: dict[Feeder, int] = {}  # the loaders that gave batches since the last step, and how many
        self.feeders: weakref.WeakSet[Feeder] = weakref.WeakSet()  # all of them so far
        self.brief = 0  # trainings that were over after a few steps
        self.has_stepped = False
        self.lonely = 0  # backwards where there is an optimizer, but none has ever stepped
        self.suspicion: Suspicion | None = None  # backwards that may be a training without an optimizer
        self.is_unfounded = False

    @property
    def is_alive(self) -> bool:
        """Whether its thread still runs."""
        thread = self._thread()
        return thread is not None and thread.is_alive()

    def draw(self, feeder: Feeder) -> None:
        """A loader gave a batch."""
        self.drawn[feeder] = self.drawn.get(feeder, 0) + 1
        self.feeders.add(feeder)

    def begin(self, others: Sequence[Lane]) -> None:
        """An optimizer begins to step, after backwards here and in `others`; those from now on are of its closure."""
        self.before = [loss for lane in (self, *others) for loss in lane.losses]
        for lane in (self, *others):
            lane.losses.clear()
            lane.leaves.clear()
        self.has_stepped, self.suspicion = True, None

    def end(self, others: Sequence[Lane]) -> tuple[list[Tensor], list[Terms], dict[Feeder, int]]:
        """The step is over: its losses, what they compare, and the batches that were drawn here and in `others`."""
        losses, terms = [*self.before, *list(self.losses)[-1:]], self.terms
        drawn: dict[Feeder, int] = {}
        for lane in (self, *others):
            taken, lane.drawn = lane.drawn, {}
            for feeder, count in taken.items():
                drawn[feeder] = drawn.get(feeder, 0) + count
        self.forget()
        return losses, terms, drawn

    def forget(self) -> None:
        """Losses that are left belong to no step."""
        self.losses.clear()
        self.leaves.clear()
        self.before, self.terms = [], []
