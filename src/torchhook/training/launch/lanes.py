"""What one thread of the script has done since its last step, so that several can train at the same time."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torchhook.training.launch.feeding import Feeder
from torchhook.training.monitor import Terms

if TYPE_CHECKING:
    from torchhook.training.launch.by_hand import Suspicion

_BACKWARDS = 1000  # losses that are kept between two steps, at most


class Lane:
    """One thread of the script: its losses, what they compare, and the batches that it drew, until it steps.

    With each loss come the ids of the tensors that it depends on, if another thread may step after its backward.
    """

    def __init__(self) -> None:
        self._thread = weakref.ref(threading.current_thread())
        self.losses: deque[tuple[Tensor, set[int] | None]] = deque(maxlen=_BACKWARDS)
        self.before: list[Tensor] = []  # losses from before the step began
        self.others: list[tuple[Tensor, set[int] | None]] = []  # those for other optimizers, while one steps
        self.terms: list[Terms] = []  # what they compare
        self.drawn: dict[Feeder, int] = {}  # the loaders that gave batches since the last step, and how many
        self.feeders: weakref.WeakSet[Feeder] = weakref.WeakSet()  # all of them so far
        self.brief = 0  # trainings that were over after a few steps
        self.has_stepped = False
        self.has_helped = False  # whether an optimizer in another thread stepped after a backward here
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

    def take(self, is_mine: Callable[[set[int] | None], bool]) -> list[Tensor]:
        """Take out the losses that belong to a step, as their leaves say."""
        taken = [loss for loss, leaves in self.losses if is_mine(leaves)]
        rest = [pair for pair in self.losses if not is_mine(pair[1])]
        self.losses.clear()
        self.losses.extend(rest)
        return taken

    def begin(self, losses: list[Tensor]) -> None:
        """An optimizer begins to step, after backwards with these losses; those from now on are of its closure."""
        self.before, self.others = losses, list(self.losses)
        self.losses.clear()
        self.has_stepped, self.suspicion = True, None

    def end(self, others: Sequence[Lane]) -> tuple[list[Tensor], list[Terms], dict[Feeder, int]]:
        """The step is over: its losses, what they compare, and the batches that were drawn here and in `others`."""
        losses, terms = [*self.before, *(loss for loss, _ in list(self.losses)[-1:])], self.terms
        drawn: dict[Feeder, int] = {}
        for lane in (self, *others):
            taken, lane.drawn = lane.drawn, {}
            for feeder, count in taken.items():
                drawn[feeder] = drawn.get(feeder, 0) + count
        kept = self.others
        self.forget()
        self.losses.extend(kept)
        return losses, terms, drawn

    def forget(self) -> None:
        """Losses that are left belong to no step."""
        self.losses.clear()
        self.before, self.others, self.terms = [], [], []
