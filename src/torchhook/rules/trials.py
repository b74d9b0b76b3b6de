"""Tries the repairs of findings on copies, and says how much lower the loss was then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, Loss, call, loss_of
from torchhook.core.findings import Finding, Severity, Trial
from torchhook.core.model_state import random_state_kept
from torchhook.core.trees import mapped
from torchhook.rules.history import GOOD
from torchhook.rules.repairs import Repair, Setup, repairs_for
from torchhook.rules.rule import Rule
from torchhook.rules.step import train_step

_LEAST = 10  # steps of a training that say something
_LONGER = 30  # times the steps of the inspection, if there is time: much is decided late
_GUESSING, _LEARNT = 0.85, 0.65  # of the loss of guessing: above and below which a training guesses, and has learnt
_SHARE = 0.25  # of the loss that a repair has to take away
_LITTLE = 0.1  # the same, where the loss is stuck without the repair and not with it
_STUCK = 0.95  # of an earlier loss: a training that ends above has learnt nothing since
_FIRST_LOOK = 16  # steps, then twice as many, and so on: when the loss is looked at on the way
_LEAST_GAIN = 0.03  # of the first loss, or that of guessing: a loss near zero needs no repair
_DECIDED = ("TH301", "TH303", "TH603", "TH609", "TH612")  # by the trial alone: even an info becomes a warning
_HELD = 5  # one batch in this many is held back to judge by


class Trials:
    """Trains copies with and without a repair, for at most `seconds` in all.

    `copies` makes a fresh copy of the model and of its optimizer.
    """

    def __init__(
        self,
        copies: Callable[[], tuple[nn.Module, Any]],
        batches: Sequence[Batch],
        loss: Loss | None,
        steps: int,
        seconds: float,
        chance: float = math.nan,
    ) -> None:
        self.copies = copies
        self.chance = chance  # the loss of the best constant prediction
        self.loss = loss
        self.steps = steps
        self.seconds = seconds
        self.watch = _Stopwatch()
        held = len(batches) // _HELD if len(batches) >= _HELD else 0
        self.batches = list(batches[: len(batches) - held])
        self.held = list(batches[-held:]) if held else list(batches)
        self.notes: list[str] = []
        self._plain: _Outcome | None = None  # without any repair
        self._known: dict[str, Trial | None] = {}  # by what was changed

    def judged(self, found: Mapping[Rule, Sequence[Finding]]) -> dict[Rule, list[Finding]]:
        """The findings after their repairs were tried: the worst of each rule, all first repairs before the second."""
        first = {rule: max(findings, key=lambda one: one.severity.rank) for rule, findings in found.items() if findings}
        worth = {rule: one for rule, one in first.items() if one.severity > Severity.INFO or rule.code in _DECIDED}
        order = sorted(worth, key=lambda rule: (-worth[rule].severity.rank, rule.phase, rule.code))
        repairs = {rule: repairs_for(worth[rule]) for rule in order}
        for number in range(max(map(len, repairs.values()), default=0)):
            for rule in order:
                if number < len(repairs[rule]) and not any(map(self._has_helped, repairs[rule][:number])):
                    self._try(repairs[rule][number])
        after: dict[Rule, list[Finding]] = {rule: list(findings) for rule, findings in found.items()}
        for rule in order:
            tried = self._verdict(repairs[rule])
            if tried is not None:
                after[rule] = [self._after(one, rule, *tried, one is worth[rule]) for one in found[rule]]
        return after

    def _after(self, finding: Finding, rule: Rule, trial: Trial, cause: str, is_shown: bool) -> Finding:
        """The finding after a trial: at least a warning if the repair helped, a severity lower if it is not needed.

        Where nothing is learnt, a repair that does not help proves nothing: there may be a second fault.
        """
        tried, works = trial if is_shown else None, self._works(finding) and not self._teaches(trial)
        if trial.helped and not (works and rule.forgiving and rule.code not in _DECIDED):
            severity = max(finding.severity, Severity.WARNING, key=lambda severity: severity.rank)
            evidence = {**finding.evidence, "cause": cause} if cause else finding.evidence
            return replace(finding, severity=severity, evidence=evidence, tried=tried)
        lower = {Severity.ERROR: Severity.WARNING}.get(finding.severity, Severity.INFO)
        return replace(finding, severity=lower if works else finding.severity, tried=tried)

    def _teaches(self, trial: Trial) -> bool:
        """Whether the training is hardly better than guessing, and well below that with the repair."""
        assert self._plain is not None
        level = self._plain.first if math.isnan(self.chance) else self.chance
        return trial.helped and self._plain.last > _GUESSING * level and trial.repaired < _LEARNT * level

    def _works(self, finding: Finding) -> bool:
        """Whether the training without a repair gets well below what guessing gives, or is on its way there."""
        assert self._plain is not None
        if finding.code == "TH601" and self._plain.last < _STUCK * self._plain.first:
            return True
        return self._plain.last < GOOD * self.chance

    def _verdict(self, repairs: Sequence[Repair]) -> tuple[Trial, str] | None:
        """The first repair that helped and what is at fault then, else the best; None if nothing can be said."""
        tried = [(trial, repair) for repair in repairs if (trial := self._known.get(repair.change)) is not None]
        helpful = [(trial, repair.cause) for trial, repair in tried if trial.helped]
        others = [(trial, "") for trial, repair in tried if repair.decides]
        return next(iter(helpful), min(others, key=lambda pair: _or_infinite(pair[0].repaired), default=None))

    def _has_helped(self, repair: Repair) -> bool:
        trial = self._known.get(repair.change)
        return trial is not None and trial.helped

    def _try(self, repair: Repair) -> None:
        """Try a repair, once."""
        if repair.change not in self._known:
            self._known[repair.change] = self._new_trial(repair)

    def _new_trial(self, repair: Repair) -> Trial | None:
        if self._plain is None:
            self._plain = self._outcome(None)
            if self._plain is None or (self._plain.steps < _LEAST and math.isfinite(self._plain.last)):
                self.seconds = 0.0
                self.notes.append("no repair was tried: ten steps of the training take too long; raise seconds=")
        if self._plain is None or self.watch.elapsed + self._plain.seconds > self.seconds:
            return None
        outcome = self._outcome(repair)
        if outcome is None:
            return None
        steps = next((at for at in (outcome.steps, self._short) if self._helps(outcome, at, repair.share)), None)
        at = outcome.steps if steps is None else steps
        return Trial(repair.change, self._plain.at(at), outcome.at(at), at, steps is not None)

    def _outcome(self, repair: Repair | None) -> _Outcome | None:
        """Train a copy, with a repair or without; None if the repair does not apply to this model."""
        setup = Setup(*self.copies(), list(self.batches), list(self.held))
        watch = _Stopwatch()
        try:
            with random_state_kept(setup.model):
                torch.manual_seed(0)
                if repair is not None:
                    repair.apply(setup)
                return _Outcome(self._train(setup), watch.elapsed)
        except Exception:  # of the user's code, or because the repair does not fit
            return None

    def _helps(self, repaired: _Outcome, step: int, least_share: float) -> bool:
        """Whether the loss is clearly lower with the repair: by a share of it, and by a standard error."""
        plain = self._plain
        assert plain is not None
        if not math.isfinite(repaired.last):
            return False
        if not math.isfinite(plain.at(step)):
            return True
        gains = [a - b for a, b in zip(plain.best(step), repaired.best(step), strict=True)]
        error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
        share = max(least_share, _LITTLE if plain.is_stuck(step) and not repaired.is_stuck(step) else _SHARE)
        levels = (abs(plain.first), abs(repaired.first), self.chance)
        least = _LEAST_GAIN * min(level for level in levels if not math.isnan(level))
        return fmean(gains) > max(share * abs(plain.at(step)), least, error)

    @property
    def _most(self) -> int:
        """As many steps as the training without a repair took; if that broke down, as many as the inspection."""
        if self._plain is None:
            return _LONGER * self.steps
        return self._plain.steps if math.isfinite(self._plain.last) else self.steps

    @property
    def _short(self) -> int:
        """The last look within the steps of the inspection itself."""
        assert self._plain is not None
        return max((at for at in self._plain.losses if at <= self.steps), default=0)

    def _train(self, setup: Setup) -> dict[int, list[float]]:
        """Train for as many steps as the training without a repair, or as there is time for.

        Returns the losses of the batches held back, by step: before, now and then on the way, and at the end.
        """
        watch, looks = _Stopwatch(), {0: self._held_losses(setup)}
        share = (self.seconds - self.watch.elapsed) / 4  # this one, and some repairs
        most = self._most
        for step in range(1, most + 1):
            batch = _copied(setup.batches[(step - 1) % len(setup.batches)])
            value, _ = train_step(setup.model, setup.optimizer, batch, self.loss)
            is_over = not math.isfinite(value) or (self._plain is None and watch.elapsed > share)
            if is_over or step == most or (step >= _FIRST_LOOK and step & (step - 1) == 0):
                looks[step] = self._held_losses(setup)
            if is_over:
                break
        return looks

    @torch.no_grad()
    def _held_losses(self, setup: Setup) -> list[float]:
        found = []
        for batch in map(_copied, setup.held):
            output = call(setup.model, batch)
            output = output if setup.in_units is None else setup.in_units(output)
            found.append(float(loss_of(output, batch.target, self.loss).loss))
        return found


class _Stopwatch:
    """Measures the time that this thread computes; on a busy machine, at least a third of the time that passes."""

    def __init__(self) -> None:
        self._begun = time.thread_time(), time.monotonic()

    @property
    def elapsed(self) -> float:
        """The seconds so far."""
        computing, passing = self._begun
        return max(time.thread_time() - computing, (time.monotonic() - passing) / 3)


class _Outcome:
    """How a short training went: the losses of the batches held back, by step."""

    def __init__(self, losses: dict[int, list[float]], seconds: float) -> None:
        self.losses = losses
        self.seconds = seconds
        self.steps = max(losses)
        self.first, self.last = fmean(losses[0]), self.at(self.steps)

    def best(self, step: int) -> list[float]:
        """The lowest losses within `step` steps, since few batches are soon learnt by heart; the last, if it broke."""
        seen = [losses for at, losses in self.losses.items() if at <= step]
        return min(seen, key=fmean) if math.isfinite(fmean(seen[-1])) else seen[-1]

    def at(self, step: int) -> float:
        """The mean of the lowest losses within `step` steps."""
        return fmean(self.best(step))

    def is_stuck(self, step: int) -> bool:
        """Whether the loss did not fall in the second half of the first `step` steps."""
        return self.at(step) > _STUCK * self.at(step // 2)


def _copied(batch: Batch) -> Batch:
    """A copy of a batch, since models may overwrite their inputs."""
    return Batch(*mapped(Tensor.clone, tuple(batch)))


def _or_infinite(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss
