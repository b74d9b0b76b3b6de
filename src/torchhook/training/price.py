"""The promised price: what watching has cost so far, and whether another measurement can be afforded.

A measured step costs what it takes longer than the steps around it that are not measured, which includes the time in
hooks, on the device, and what it makes the training wait for. To that comes the processor time of the monitor's own
thread, which takes the interpreter, if not the processor, from the training. Medians count, since an evaluation or a
checkpoint may fall into any step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from enum import IntEnum
from statistics import median
from typing import Any

from torch import nn

from torchhook.training.timeline import Timeline

_ORDINARY = 0.9  # of the price: the rest is saved for when a finding is near
_AHEAD = (
    8  # measurements that may be paid from the savings for one alarm, or overdraw the price early on: rules need some
)
_OVERDRAFT = 0.7  # seconds that a training of under a minute may be overdrawn by; with what is not known yet, 1
_SHORT = 60.0
_FREE = 0.02  # seconds of that for measuring as often as asked for, unless findings are waited for
_FIRST = 6  # measurements as often as asked for, whatever they cost: rules need about as many
_GROWTH = 2  # beyond that, each of the first measurements is at this many times the step of the one before
_STEPS = 48  # that the usual length of a step is the median of
_SAMPLES = 9  # of each kind of measured step
_DEARER = 3  # times as much as a lesser kind of measured step, as long as it is not known
_UNKNOWN, _IN_A_ROW = 4, 32  # measured steps before one that is not shows what they cost: at first, and later
_FEW = 16  # idle steps between two estimates
_QUICK, _STRIDE = 0.005, 16  # where steps are this quick, looking at each of them would cost too much


class Kind(IntEnum):
    """How much is measured in a step."""

    OFTEN = 0
    SELDOM = 1
    RARE = 2


class Price:
    """Keeps the cost of watching at or under `share` of the training's own time.

    The first measurements may overdraw it, so that a short training is judged, too: by at most a second, which later
    steps pay back. With `is_prompt`, findings are waited for, and all of that is spent as early as asked for.
    """

    def __init__(self, share: float, model: nn.Module, is_prompt: bool = False, every: int = 1) -> None:
        self.share = share
        self._every = every  # what was asked for
        self._free = _OVERDRAFT if is_prompt else _FREE
        self.steps = 0
        self.measured = 0
        self._elapsed = 0.0  # seconds of the training's own, until the last estimate
        self._counted = 0  # steps that this includes
        self._each = 0.0  # seconds of ours in each step that is looked at
        self._looked = 0  # how many those are
        self._own: deque[float] = deque(maxlen=_STEPS)
        self._apart = 0.0  # seconds of ours that are not in the length of a measured step
        self._beside = 0.0  # of which the monitor's own thread took these
        self._entries = 0  # that it took them for
        self._usual: float | None = None  # seconds of a step that is not measured
        self._in_a_row = 0  # measured steps since the last of them
        self._recent: deque[float] = deque(maxlen=_STEPS)
        self._unseen = 0  # how many of them are newer than the last estimate
        self._lengths: dict[Kind, deque[float]] = {kind: deque(maxlen=_SAMPLES) for kind in Kind}
        self._counts = dict.fromkeys(Kind, 0)
        self._costs = dict.fromkeys(Kind, 0.0)  # seconds by which a measured step is longer
        self._ahead = 0  # measurements that may be paid from the savings
        self._refuses_until = 0  # the step
        self._is_urgent = False  # whether one may overdraw the price
        self._next_early = 0  # the step at which the next of the first measurements is due
        self._timeline = Timeline(model)
        self._marked = -1  # the last step whose end was marked
        self.stride = _STRIDE  # where steps are quick, the length of one in this many is looked at
        self.quiet = 0  # how many of the next steps need no look, as long as they are not measured
        self._is_quick = False

    def allows(self, kind: Kind) -> bool:
        """Whether the next step may be measured; if so, it is counted as measured."""
        if self._is_urgent:
            self._is_urgent = False
            self.begin(kind)
            return True
        if self._in_a_row >= (_UNKNOWN if len(self._recent) < _FEW else _IN_A_ROW):
            return False
        cost = self._costs[kind] + self._beside / max(self._entries, 1)
        left = self.share * self.elapsed - self.spent - cost
        is_ahead = self._ahead > 0 and -left <= max(self._credit, 0.0)
        is_paid = left >= (1 - _ORDINARY) * self.share * self.elapsed
        if not (is_paid or is_ahead or self._is_early(kind, left)):
            self._refuse(kind, left)
            return False
        self._ahead -= is_ahead
        self.begin(kind)
        return True

    @property
    def is_refusing(self) -> bool:
        """Whether `allows` need not be asked, since nothing can be afforded yet."""
        return self.steps < self._refuses_until and not self._is_urgent and not self._ahead

    def allows_entry(self) -> bool:
        """Whether an entry of losses alone can be afforded."""
        return self.spent + self._beside / max(self._entries, 1) < _ORDINARY * self.share * self.elapsed

    def begin(self, kind: Kind) -> None:
        """A step begins that is measured."""
        self._next_early, self._refuses_until = _GROWTH * (self.steps + 1), 0
        self._counts[kind] += 1
        self._in_a_row += 1

    def end_step(self, kind: Kind | None, is_next_measured: bool, begun: float, left: int = 0) -> None:
        """A step of the training has ended, which was measured if it has a `kind`; our own part began at `begun`.

        `left` of the steps that were `quiet` are still to come.
        """
        self.steps = steps = self.steps + 1 + self.quiet - left
        phase = steps % self.stride
        may_rest = self._is_quick and phase > 0 and not is_next_measured  # what is measured is taken at its own step
        self.quiet = self.stride - 1 - phase if may_rest else 0
        self._looked += 1
        self.measured += kind is not None
        is_idle = kind is None and not (is_next_measured and (self._usual or steps < _FEW))  # some never step
        if is_idle:
            self._own.append(time.perf_counter() - begun)
        label = kind, is_idle, self._marked == steps - 1
        self._marked = steps
        for (known, was_idle, is_one_step), seconds in self._timeline.mark(label):
            if is_one_step:
                self._know(known, was_idle, seconds)

    def book(self, seconds: float) -> None:
        """The training's own thread worked for us outside of a measured step."""
        self._apart += seconds

    def book_beside(self, seconds: float) -> None:
        """The monitor's own thread has worked on an entry."""
        self._entries += 1
        self._beside += seconds

    @property
    def affordable(self) -> int:
        """One step in how many may be measured by what they have cost so far; 1 as long as that is not known."""
        if not self.measured or not self._usual or len(self._recent) < _FEW // 2:
            return 1
        return math.ceil(self.spent / self.measured / (self.share * self._usual))

    def alarm(self, is_urgent: bool = False) -> None:
        """A finding is near: the next measurements may be paid from the savings, an urgent one may overdraw them."""
        self._ahead = _AHEAD
        self._is_urgent |= is_urgent

    @property
    def elapsed(self) -> float:
        """The seconds that the training took so far, without ours."""
        return self._elapsed + (self._usual or 0.0) * (self.steps - self._counted)

    @property
    def spent(self) -> float:
        """The seconds that watching has cost so far."""
        measured = sum(count * self._costs[kind] for kind, count in self._counts.items())
        return measured + self._each * self._looked + self._apart + self._beside

    @property
    def did(self) -> dict[str, Any]:
        """What was really done, as JSON values, with a sentence that says it."""
        cost = round(self.spent / self.elapsed, 4) if self.elapsed else None
        return {"steps": self.steps, "measured": self.measured, "cost": cost, "said": self._said}

    @property
    def _said(self) -> str:
        every = round(max(self.steps, 1) / max(self.measured, 1))
        often = f"1 step in {every:,}" if every > 1 else "every step"
        return f"measured {often}" + (f" to stay under {self.share * 100:g} %" if every > self._every else "")

    def _know(self, kind: Kind | None, is_idle: bool, seconds: float) -> None:
        """The length of a step is known now."""
        if kind is not None:
            self._lengths[kind].append(seconds)
        elif is_idle:
            self._recent.append(seconds)
            self._unseen += 1
            self._in_a_row = 0
        if self._recent and (kind is not None or len(self._recent) < _FEW or self._unseen >= _FEW):
            self._estimate()

    def _estimate(self) -> None:
        """How much longer each kind of measured step takes; for one that is not known yet, a guess from a lesser."""
        self._usual, self._unseen, cost = _typical(self._recent), 0, 0.0
        self._each = median(self._own)
        self._elapsed, self._counted = self._elapsed + self._usual * (self.steps - self._counted), self.steps
        self._is_quick = self._usual < _QUICK and len(self._recent) >= _FEW
        for kind, known in self._lengths.items():
            if known:
                cost = max(_typical(known) - self._usual, 0.0)
            else:
                cost *= _DEARER
            self._costs[kind] = cost

    def _refuse(self, kind: Kind, left: float) -> None:
        """Do not look again until half of what is missing was earned."""
        missing = (1 - _ORDINARY) * self.share * self.elapsed - left
        earned = self.share * (self._usual or math.inf)
        until = self.steps + int(missing / earned / 2)
        is_early = kind is not Kind.RARE and -left <= self._credit
        self._refuses_until = min(until, self._next_early - 1) if is_early else until

    @property
    def _credit(self) -> float:
        """The seconds that may be overdrawn now: no more than what is earned until the training has run a minute."""
        return min(_OVERDRAFT, self.share * (_SHORT - self.elapsed))

    def _is_early(self, kind: Kind, left: float) -> bool:
        """Whether a measurement is one of the first, which may overdraw the price."""
        if -left > self._credit:
            return False
        is_due = sum(self._counts.values()) < _FIRST or self.steps + 1 >= self._next_early
        return -left < self._free or (kind is not Kind.RARE and is_due)


def _typical(lengths: deque[float]) -> float:
    """The usual length of a step; few may be the first steps of a training, which are long anyway."""
    return median(lengths) if len(lengths) > 2 else min(lengths)
