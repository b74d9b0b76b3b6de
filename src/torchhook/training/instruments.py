"""Everything that a monitor attaches to a model, and when each part of it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from torchhook.core.call_wrapper import compiled_among
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.rules.history import History, joined
from torchhook.rules.rule import Rule
from torchhook.rules.watch import Watch
from torchhook.stats.clock import Clock, SlowClock
from torchhook.stats.reading import Snapshot
from torchhook.training.maps import Maps
from torchhook.training.wires import Wires

SELDOM = 10  # one in this many measured steps includes what is expensive
_RARE = 100  # one in this many, and the 4th, 8th, 16th, …, includes what is most expensive
_WIDEST = 256  # layers with more units have no covariances, which are kept throughout the training


class Instruments:
    """Measures statistics, feature maps and the wiring of layers of `model`, from now until `detach`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        rules: Iterable[Rule],
        history: History,
        every: int,
        on_fault: Callable[[Exception], None],
    ) -> None:
        self.clock = Clock(every, by_passes=False, training_only=True)
        self.seldom = SlowClock(self.clock, SELDOM)
        self.watch = Watch(
            model,
            rules,
            optimizer,
            history,
            clock=self.clock,
            seldom=self.seldom,
            scope="all",
            widest=_WIDEST,
            detours=False,
            on_fault=on_fault,
        )
        self._on_fault = on_fault
        self._maps = Maps(self.seldom)
        self._wires = Wires()
        self._wiring = ExitStack()  # is closed after the first measured step
        self._ended = 0  # how many steps of the clock were taken
        self._taken = 0
        with ExitStack() as attached:
            attached.enter_context(self.watch)
            attached.callback(self.watch.forget_thorough)  # half a step must not enter the history
            attached.push(self._wiring)
            if not compiled_among(model.modules()):
                self._attach(model, self._maps.taps(model), attached)
                self._attach(model, self._wires.taps(model), self._wiring)
            self.watch.begin_thorough()
            self._attached = attached.pop_all()

    @property
    def has_measured(self) -> bool:
        """Whether a measured step has ended since the last `take`."""
        return self.clock.ended > self._ended

    def take(self) -> tuple[Snapshot, Callable[[], Mapping[str, Tensor]], Wires]:
        """What was measured since the last call: statistics, a reader of feature maps, and the wires."""
        self._ended = self.clock.ended
        self._taken += 1
        snapshots = [self.watch.window()]
        if self.watch.is_thorough:
            snapshots.append(self.watch.end_thorough())
        self._wiring.close()
        wires, self._wires = self._wires, Wires()
        return joined(snapshots), self._maps.taken(), wires

    def plan(self) -> None:
        """Decide whether the next measured step includes what is most expensive."""
        is_power_of_two = self._taken & (self._taken - 1) == 0
        if (is_power_of_two and self._taken > 2) or self._taken % _RARE == 0:
            self.watch.begin_thorough()

    def detach(self) -> None:
        """Leave the model and the optimizer as they were."""
        self._attached.close()

    def _attach(self, model: nn.Module, taps: list[Tap], stack: ExitStack) -> None:
        if taps:
            session = Session(model, taps, scope="all", on_silent="ignore", on_fault=self._on_fault, when=self.seldom)
            stack.callback(session.open().abandon)
