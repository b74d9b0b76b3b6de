"""Tries the repairs of findings on copies, and says by how much the loss fell then."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

from torchhook.core.batch import Batch, Loss, call, loss_of
from torchhook.core.findings import Finding, Severity, Trial
from torchhook.rules.repairs import Repair, Setup, repairs_for
from torchhook.rules.rule import Rule
from torchhook.rules.step import train_step

_LEAST = 10  # steps of a training that say something
_SHARE = 0.1  # of the loss that a repair has to take away
_FIRST = 0.03  # of the first loss that it has to take away: a loss near zero needs no repair
_HELD = 5  # one batch in so many is held back to judge by


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
    ) -> None:
        self.copies = copies
        self.loss = loss
        self.most = steps
        self.until = time.monotonic() + seconds
        held = len(batches) // _HELD if len(batches) >= _HELD else 0
        self.batches = list(batches[: len(batches) - held])
        self.held = list(batches[-held:]) if held else list(batches)
        self.notes: list[str] = []
        self._plain: _Outcome | None = None  # without any repair

    def judged(self, found: Mapping[Rule, Sequence[Finding]]) -> dict[Rule, list[Finding]]:
        """The findings after their repairs were tried: the worst of each rule, the worst rules first."""
        first = {rule: max(findings, key=lambda one: one.severity.rank) for rule, findings in found.items() if findings}
        repaired: dict[Rule, list[Finding]] = {rule: list(findings) for rule, findings in found.items()}
        for rule, finding in sorted(first.items(), key=lambda item: -item[1].severity.rank):
            trial = self._trial(repairs_for(finding))
            if trial is not None:
                repaired[rule] = [_after(one, trial, one is finding) for one in found[rule]]
        return repaired

    def _trial(self, repairs: Sequence[Repair]) -> Trial | None:
        """The first repair that helps, else the best of those that were tried; None if none could be tried."""
        tried: list[Trial] = []
        for repair in repairs:
            trial = self._tried(repair)
            if trial is not None:
                tried.append(trial)
                if trial.helped:
                    break
        known = [trial for trial in tried if not math.isnan(trial.repaired)]
        return min(known or tried, key=lambda trial: (not trial.helped, trial.repaired), default=None)

    def _tried(self, repair: Repair) -> Trial | None:
        if self._plain is None:
            self._plain = self._outcome(None)
            if self._plain is None or self._plain.steps < _LEAST:
                self.until = 0.0
                self.notes.append("no repair was tried: a training of ten steps takes too long; raise seconds=")
        if self._plain is None or time.monotonic() + self._plain.seconds > self.until:
            return None
        outcome = self._outcome(repair)
        if outcome is None:
            return None
        return Trial(repair.change, self._plain.mean, outcome.mean, self._plain.steps, _helps(self._plain, outcome))

    def _outcome(self, repair: Repair | None) -> _Outcome | None:
        """Train a copy, with a repair or without; None if the repair does not apply to this model."""
        setup = Setup(*self.copies(), list(self.batches), list(self.held))
        begun = time.monotonic()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                if repair is not None:
                    repair.apply(setup)
                first, steps = self._train(setup)
                return _Outcome(first, self._held_losses(setup), steps, time.monotonic() - begun)
        except Exception:  # of the user's code, or because the repair does not fit
            return None

    def _train(self, setup: Setup) -> tuple[float, int]:
        """Train for as many steps as the first training did, or as there is time for; the first loss, and how many."""
        first, begun = math.nan, time.monotonic()
        share = (self.until - begun) / 4  # this one, and some repairs
        most = self.most if self._plain is None else self._plain.steps
        for step in range(most):
            batch = setup.batches[step % len(setup.batches)]
            value, _ = train_step(setup.model, setup.optimizer, batch, self.loss)
            first = value if step == 0 else first
            if not math.isfinite(value) or (self._plain is None and time.monotonic() - begun > share):
                return first, step + 1
        return first, most

    @torch.no_grad()
    def _held_losses(self, setup: Setup) -> list[float]:
        found = []
        for batch in setup.held:
            output = call(setup.model, batch)
            output = output if setup.in_units is None else setup.in_units(output)
            found.append(float(loss_of(output, batch.target, self.loss).loss))
        return found


class _Outcome:
    """How a short training ended."""

    def __init__(self, first: float, losses: list[float], steps: int, seconds: float) -> None:
        self.first = first
        self.losses = losses
        self.steps = steps
        self.seconds = seconds
        self.mean = fmean(losses)


def _helps(plain: _Outcome, repaired: _Outcome) -> bool:
    """Whether the loss is clearly lower with the repair: by a share of it, and by two standard errors."""
    if not math.isfinite(repaired.mean):
        return False
    if not math.isfinite(plain.mean):
        return True
    gains = [a - b for a, b in zip(plain.losses, repaired.losses, strict=True)]
    error = stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else 0.0
    first = abs(plain.first) if math.isfinite(plain.first) else 0.0
    return fmean(gains) > max(_SHARE * abs(plain.mean), _FIRST * first, 2 * error)


def _after(finding: Finding, trial: Trial, is_shown: bool) -> Finding:
    """The finding after a trial: at least a warning if the repair helped, a severity lower if it did not."""
    if trial.helped:
        severity = max(finding.severity, Severity.WARNING, key=lambda severity: severity.rank)
    else:
        severity = {Severity.ERROR: Severity.WARNING}.get(finding.severity, Severity.INFO)
    return replace(finding, severity=severity, tried=trial if is_shown else None)
