"""Which steps are measured: one in `every`, counted in optimizer steps where those are known, else in passes."""

from __future__ import annotations

import torch

from torchhook.core.passes import Page


class Clock:
    """Counts steps. Without an optimizer a step is a pass with gradients, or any pass as long as none had them."""

    __slots__ = ("active", "by_passes", "every", "step", "trains")

    def __init__(self, every: int = 1, by_passes: bool = True) -> None:
        self.every = every
        self.by_passes = by_passes
        self.step = -1 if by_passes else 0
        self.trains = False  # whether a pass had gradients
        self.active = True  # whether this step is measured

    def advance(self) -> None:
        """The next step begins."""
        self.step += 1
        self.active = self.step % self.every == 0

    def page(self, number: int, outside: bool) -> Page:
        """A pass begins; as what keeps pages, the clock is told."""
        if self.by_passes and not outside:
            graded = torch.is_grad_enabled()
            if graded and not self.trains:
                self.trains = True
                self.step = -1
            if graded or not self.trains:
                self.advance()
        return Page(number, outside, listed=True)
