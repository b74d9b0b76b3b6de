"""Everything that a monitor attaches to a model, and when each part of it measures.

In steps that are not measured, the hooks are taken out of the model.
"""

from __future__ import annotations

import time
import weakref
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
from torchhook.training.price import Kind, Price
from torchhook.training.ranks.probe import Probe, checksums
from torchhook.training.wires import Wires

SELDOM = 10  # one in this many measured steps includes what is expensive
_RARE = 100  # one in this many, and the 4th, 8th, 16th, …, includes what is most expensive
_WIDEST = 256  # layers with more units have no covariances, which are kept throughout the training


class Instruments:
    """Measures statistics, feature maps and the wiring of layers of `model`, from now until `detach`.

    One step in `every` is measured, as far as the `price` allows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        rules: Iterable[Rule],
        history: History,
        every: int,
        price: Price | None,
        on_fault: Callable[[Exception], None],
        has_ranks: bool = False,
    ) -> None:
        self.price = price
        self._was_checked = False  # whether checksums were taken in the latest measured step
        self.stretch = 1 if has_ranks else 0  # with several ranks, one step in `every` times this is measured
        self.clock = Clock(every, by_passes=False, training_only=True, allows=self._allows)
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
        self._model = weakref.ref(model)
        self._maps = Maps(self.seldom)
        self._probe = Probe(self.clock)
        self._wires = Wires()
        self._wiring = ExitStack()  # is closed after the first measured step
        self._sessions: list[Session] = []  # whose hooks are taken out of the model in idle steps
        self._ended = 0  # how many steps of the clock were taken
        self._kind: Kind | None = Kind.RARE  # of the step that runs now
        self._next: Kind | None = Kind.RARE  # of the next, if it is measured
        self._owes = False  # whether what is most expensive is due
        self._measured: Kind | None = None  # the kind of the measured step that has ended
        if price is not None:
            price.begin(Kind.RARE)
        with ExitStack() as attached:
            attached.enter_context(self.watch)
            attached.callback(self.watch.forget_thorough)  # half a step must not enter the history
            attached.push(self._wiring)
            if not compiled_among(model.modules()):
                self._attach(model, self._maps.taps(model), attached, self.seldom)
                self._attach(model, self._wires.taps(model), self._wiring, self.seldom)
                self._attach(model, self._probe.taps() if has_ranks else [], attached, self.clock)
            self.watch.begin_thorough()
            self._attached = attached.pop_all()
        if price is not None and not self.watch.sees_steps:
            price.stride = 1  # each step has to be counted
        assert self.watch.session is not None
        self._sessions.append(self.watch.session)
        self.clock.followers.append(self)

    @property
    def has_measured(self) -> bool:
        """Whether a measured step has ended since the last `take`."""
        return self.clock.ended > self._ended

    def take(self) -> tuple[Snapshot, Callable[[], Mapping[str, Tensor]], Wires]:
        """What was measured since the last call: statistics, a reader of feature maps, and the wires."""
        self._ended = self.clock.ended
        snapshots = [self.watch.window()]
        if self.watch.is_thorough:
            snapshots.append(self.watch.end_thorough())
        self._wiring.close()
        wires, self._wires = self._wires, Wires()
        return joined(snapshots), self._maps.taken(), wires

    def take_local(self) -> Callable[[], Mapping[str, Any]]:
        """A reader of what only this rank is asked: checksums are taken in every other measured step."""
        seen = self._probe.taken()
        model = self._model()
        is_due = self._measured is not None and (self._measured >= Kind.SELDOM or not self._was_checked)
        if self._measured is not None:
            self._was_checked = is_due
        sums = checksums(model, self.watch.optimizer) if model is not None and is_due else dict
        apart = 1 if self.price is None else self.price.affordable
        return lambda: {**seen(), "sums": sums(), "apart": apart}

    def plan(self) -> None:
        """Begin to measure what is most expensive, if the next step includes it and the one before was taken."""
        if self._kind is Kind.RARE and not self.has_measured and not self.watch.is_thorough:
            self.watch.begin_thorough()

    def follow(self, clock: Clock) -> None:
        """The clock has gone on: have the hooks in the model if the step is measured."""
        begun = time.perf_counter()
        self._measured, was_measured = self._kind, self._kind is not None
        self._kind = self._next if clock.active else None
        if self.stretch:
            self._probe.turn(self.watch.model, clock.active)
        if self._kind is not None:
            for session in self._sessions:
                session.resume()
            self.plan()
        elif was_measured:
            for session in self._sessions:
                session.pause()
        if self.price is not None and not was_measured:
            self.price.book(time.perf_counter() - begun)

    def wait(self) -> None:
        """The clock waits for the next step."""
        self._kind = None

    def end_step(self, begun: float, left: int) -> int:
        """The training's step is over; the monitor's part of it began at `begun`.

        Returns how many of the next steps need no look, as long as they are not measured; `left` are of those that were
        returned the last time.
        """
        if self.price is None:
            return 0
        self.price.end_step(self._measured, self.clock.active, begun, left)
        self._measured = None
        return self.price.quiet

    def detach(self) -> None:
        """Leave the model and the optimizer as they were, and let go of them."""
        self._attached.close()
        self._sessions.clear()
        self.clock.followers.clear()  # which are in a cycle with the clock
        self.clock.allows = lambda: False

    def _attach(self, model: nn.Module, taps: list[Tap], stack: ExitStack, when: Clock) -> None:
        if taps:
            session = Session(model, taps, scope="all", on_silent="ignore", on_fault=self._on_fault, when=when)
            stack.callback(session.open().abandon)
            self._sessions.append(session)

    def _allows(self) -> bool:
        """Whether the next step may be measured; what is most expensive waits until it can be afforded.

        With several ranks, all measure the same steps: the root says how far apart.
        """
        if self.stretch:
            return self._allows_all_ranks()
        if self.price is not None and self.price.is_refusing:
            return False
        number = self.clock.number + 1
        self._owes |= _is_rare(number)
        usual = Kind.SELDOM if self.seldom.includes(number) else Kind.OFTEN
        kinds = (Kind.RARE, usual) if self._owes else (usual,)
        self._next = next((kind for kind in kinds if self.price is None or self.price.allows(kind)), None)
        self._owes &= self._next is not Kind.RARE
        return self._next is not None

    def _allows_all_ranks(self) -> bool:
        apart = self.clock.every * self.stretch
        if self.clock.step % apart and not self.clock.hurries:
            return False
        number = self.clock.number + 1
        is_usual = not self.seldom.includes(number)
        self._next = Kind.RARE if _is_rare(number) else Kind.OFTEN if is_usual else Kind.SELDOM
        if self.price is not None:
            self.price.begin(self._next)
        return True


def _is_rare(number: int) -> bool:
    """Whether the `number`-th of the measured steps should include what is most expensive."""
    is_power_of_two = number & (number - 1) == 0
    return (is_power_of_two and number > 2) or number % _RARE == 0
