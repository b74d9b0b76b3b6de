"""Which steps are measured: one in `every`, counted in optimizer steps where those are known, else in passes."""

from __future__ import annotations

import torch

from torchhook.core.page import Page


class Tick(Page):
    """The page that a clock begins with a pass: it says whether the pass is measured."""

    __slots__ = ("active", "clock")

    def __init__(self, clock: Clock, number: int, outside: bool) -> None:
        super().__init__(number, outside, listed=True)
        self.clock = clock
        self.active = clock.measures()

    def measured(self) -> bool:
        """Whether a call that runs now is measured; outside of any pass, the step that runs now decides."""
        return self.clock.measures() if self.outside else self.active


class Clock:
    """Counts steps. Without an optimizer a step is a pass with gradients, or any pass as long as none had them.

    With `graded`, passes without gradients are never measured: an evaluation between two steps is not part of them.
    """

    def __init__(self, every: int = 1, by_passes: bool = True, graded: bool = False) -> None:
        self.every = every
        self.by_passes = by_passes
        self.graded = graded
        self.step = -1 if by_passes else 0
        self.trains = False  # whether a pass had gradients
        self.active = True  # whether this step is measured
        self.awaits = False  # whether a pass that is measured has not had its backward yet
        self.answered = True  # whether a backward came since the last pass
        self.ended = 0  # steps that were measured to their end
        self.slower: list[Slower] = []

    def advance(self) -> None:
        """The next step begins."""
        self.ended += self.active
        self.step += 1
        self.active = self.step % self.every == 0
        for clock in self.slower:
            clock.follow(self)

    def page(self, number: int, outside: bool) -> Tick:
        """A pass begins; the clock is told, since it keeps something of each."""
        if self.by_passes and not outside:
            graded = torch.is_grad_enabled()
            if graded and not self.trains:
                self.trains = True
                self.step = -1
            if graded or not self.trains:
                self.advance()
        self.awaits = self.active or (self.awaits and not self.answered)
        self.answered = False
        return Tick(self, number, outside)

    def measures(self) -> bool:
        """Whether a pass that begins now is measured."""
        return self.active and not (self.graded and not torch.is_grad_enabled())

    def is_backward_measured(self) -> bool:
        """Whether the gradients that come now are of a step that is measured: of one of the passes before them."""
        self.answered = True
        return self.awaits if self.by_passes else self.active


class Slower(Clock):
    """Measures one in `share` of the steps that another clock measures, and the first `share` // 2 of them."""

    def __init__(self, clock: Clock, share: int) -> None:
        super().__init__(clock.every * share, by_passes=False, graded=clock.graded)
        self.early = clock.every * (share // 2)
        clock.slower.append(self)

    def follow(self, clock: Clock) -> None:
        """The other has gone on to its next step."""
        self.ended += self.active
        self.step = clock.step
        self.active = clock.active and (self.step % self.every == 0 or self.step < self.early)
