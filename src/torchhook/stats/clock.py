"""Decides which steps are measured: one in `every`, counted in steps of the optimizer, or in passes without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

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


class Follower(Protocol):
    """Does something when a clock begins or ends to measure."""

    def follow(self, clock: Clock) -> None:
        """The clock has gone on to a step that is measured, or comes after one that is."""

    def wait(self) -> None:
        """The clock waits for the next step."""


class Clock:
    """Counts steps, and says which are measured: one in `every`, if `allows` returns True.

    With an optimizer, its steps call `advance`. Without one, the clock counts `by_passes`: a step is a pass with
    gradients, or any pass as long as none had gradients. With `training_only`, passes without gradients are not
    measured, because an evaluation between two steps is not part of them.
    """

    def __init__(
        self,
        every: int = 1,
        by_passes: bool = True,
        training_only: bool = False,
        allows: Callable[[], bool] = lambda: True,
    ) -> None:
        self.every = every
        self.allows = allows
        self.by_passes = by_passes
        self.training_only = training_only
        self.step = -1 if by_passes else 0
        self.active = True  # whether the current step is measured
        self.hurries = False  # whether the next step is due, whatever its number
        self.number = self.step  # of the latest measured step, among those that are measured
        self.ended = 0  # measured steps that are over
        self.followers: list[Follower] = []
        self._has_trained = False  # whether a pass had gradients
        self._awaits_backward = False  # whether the next backward belongs to a measured pass
        self._had_backward = True  # since the last pass

    def advance(self) -> None:
        """Go on to the next step."""
        was_active = self.active
        self.step += 1
        self.active = (self.hurries or self.step % self.every == 0) and self.allows()
        self.hurries = False
        if was_active or self.active:
            self.ended += was_active
            self.number += self.active
            for follower in self.followers:
                follower.follow(self)

    def wait(self) -> None:
        """Do not measure the step that runs now, which began before the clock did, but the next one."""
        self.step, self.active, self.number = -1, False, -1
        for follower in self.followers:
            follower.wait()

    def page(self, number: int, outside: bool) -> Tick:
        """A pass begins: count it, and return a page that says whether it is measured."""
        if self.by_passes and not outside:
            self._count_pass()
        self._awaits_backward = self.active or (self._awaits_backward and not self._had_backward)
        self._had_backward = False
        return Tick(self, number, outside)

    def measures(self) -> bool:
        """Whether a pass that begins now is measured."""
        return self.active and not (self.training_only and not torch.is_grad_enabled())

    def is_backward_measured(self) -> bool:
        """Whether the gradients that come now belong to a measured step."""
        self._had_backward = True
        return self._awaits_backward if self.by_passes else self.active

    def _count_pass(self) -> None:
        """Count a pass. The first one with gradients starts again from 0, and from then on only such passes count."""
        with_gradients = torch.is_grad_enabled()
        if with_gradients and not self._has_trained:
            self._has_trained = True
            self.step = -1
        if with_gradients or not self._has_trained:
            self.advance()


class SlowClock(Clock):
    """Measures one in `share` of the steps that another clock measures, and the first `share` // 2 of them."""

    def __init__(self, clock: Clock, share: int) -> None:
        super().__init__(clock.every * share, by_passes=False, training_only=clock.training_only)
        self.share = share
        clock.followers.append(self)

    def includes(self, number: int) -> bool:
        """Whether it measures the step that the other clock measures as its `number`-th, counted from 0."""
        return number % self.share == 0 or number < self.share // 2

    def follow(self, clock: Clock) -> None:
        """The other clock has gone on."""
        self.ended += self.active
        self.step = clock.step
        self.active = clock.active and self.includes(clock.number)
