"""Checking the rules while a training runs, for a small share of its time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch

from torchhook.core.findings import Finding, Report, Severity
from torchhook.rules.entry import Entry
from torchhook.rules.history import History
from torchhook.stats import Covariance, Moments
from torchhook.stats.kernels.plain import FIELDS
from torchhook.stats.reading import Snapshot
from torchhook.training.price import Price

_WINDOWS = 128  # entries that the history keeps: beyond that, every second of the older ones is dropped
_SHARE = 0.25  # of the price may be spent on checks
_PRICE = 0.02  # if there is none
_GUESS = 0.01  # seconds, before the first check
_FIRST = 8  # entries before the first check, unless something is not finite
_MORE = 1.25  # times the entries of the last check: rules judge the last quarter, and would see little new before
_AT_ONCE = "TH1"
_RECENT = 32  # losses that a new one is compared with
_JUMP = 2  # times their median: then a finding may be near


class Judge:
    """Keeps the history of a training, decides when to check it, and returns new findings.

    A finding (by code and site) is reported once, and only after two checks in a row, because much that is seen early
    in a training goes away. What is not finite is reported at once, and so is what explains it. Findings that no longer
    hold at the end become notes of the report. A `prompt` judge also checks whenever there are a quarter more entries,
    regardless of the time: about 20 times in the first 1,000 entries, and 10 more times in the first 10,000.
    """

    def __init__(
        self,
        history: History,
        check: Callable[[History], Report],
        prompt: bool = False,
        price: Price | None = None,
    ) -> None:
        self.history = history
        self.report: Report | None = None
        self.seen: dict[tuple[str, str], Finding] = {}
        self._check = check
        self._prompt = prompt
        self._price = price
        self._begun = time.monotonic()
        self._spent = self._last = 0.0  # seconds in all checks, and in the last one
        self._windows = self._looked = 0  # entries so far, and at the last check
        self._finite = True
        self._losses: list[float] = []  # the latest

    def add(self, entry: Entry) -> list[Finding] | None:
        """Add a measured step. Returns the new findings, or None if it is not time for a check."""
        if entry.snapshot:
            self.history.add(entry.step, entry.snapshot)
        if entry.ranks is not None:
            if self.history.ranks and self.history.ranks[-1].step == entry.ranks.step:  # known better at the end
                self.history.ranks.pop()
            self.history.ranks.append(entry.ranks)
        self.history.losses.update(entry.losses)
        self.history.rates.update(entry.rates)
        self.history.terms.update(entry.terms)
        if entry.loop is not None and (self.history.loop is None or entry.loop.steps > self.history.loop.steps):
            self.history.loop = entry.loop
        self.history.thin(_WINDOWS, keep={finding.step for finding in self.seen.values() if finding.step is not None})
        self.history.drop(Covariance.name, most=2)
        self._windows += 1
        is_finite = _is_finite(entry.snapshot) and all(map(math.isfinite, entry.losses.values()))
        if self._price is not None and (not is_finite or self._is_near(entry)):
            self._price.alarm(is_urgent=self._finite and not is_finite)
        return self.check() if self._is_time(is_finite) else None

    def check(self, last: bool = False) -> list[Finding]:
        """Check the rules now. Returns the new findings; the `last` time, also those of one check only."""
        begun, self._looked = time.monotonic(), self._windows
        report = self._check(self.history)
        standing = {(found.code, found.site): found for found in report.findings}
        before = {(found.code, found.site) for found in self.report.findings} if self.report else set()
        new = {
            key: found
            for key, found in standing.items()
            if key not in self.seen and (key in before or last or _is_urgent(found))
        }
        self.seen.update(new)
        self.report = replace(report, notes=(*report.notes, *self._gone(report)))
        self._last = time.monotonic() - begun
        self._spent += self._last
        return list(new.values())

    def _is_time(self, is_finite: bool) -> bool:
        """Whether to check now: something is no longer finite, enough entries have come, or there is time for it."""
        was_finite, self._finite = self._finite, is_finite
        if was_finite and not is_finite:
            return True
        elapsed = time.monotonic() - self._begun if self._price is None else self._price.elapsed
        share = _PRICE if self._price is None else self._price.share
        has_time = self._spent + (self._last or _GUESS) < _SHARE * share * elapsed
        has_grown = self._prompt and self._windows >= _MORE * self._looked
        is_first = self._windows == _FIRST and self._price is None
        return is_first or (self._windows >= _FIRST and (has_time or has_grown))

    def _is_near(self, entry: Entry) -> bool:
        """Whether a finding may be near: a loss has jumped, or the last check made a finding for the first time."""
        usual = median(self._losses) if len(self._losses) == _RECENT else math.inf
        has_jumped = any(loss > _JUMP * usual > 0 for loss in entry.losses.values())
        self._losses = [*self._losses, *entry.losses.values()][-_RECENT:]
        standing = self.report.findings if self.report else ()
        return has_jumped or any((found.code, found.site) not in self.seen for found in standing)

    def _gone(self, report: Report) -> Iterator[str]:
        standing = {(found.code, found.site) for top in report.findings for found in (top, *top.affected)}
        for key, found in self.seen.items():
            if key not in standing and found.severity >= Severity.WARNING:
                yield f"no longer the case: {found}"


def _is_urgent(finding: Finding) -> bool:
    """Whether a finding is about values that are not finite, or explains them."""
    return any(found.code.startswith(_AT_ONCE) for found in (finding, *finding.affected))


def _is_finite(snapshot: Snapshot) -> bool:
    """Whether all measured values are finite."""
    states = [read() for row in snapshot.rows.values() for read in row.states.get(Moments.name, ())]
    return not states or not bool(torch.stack(states)[:, _NOT_FINITE].any())


_NOT_FINITE = [FIELDS.index(name) for name in ("nan", "posinf")]  # -Inf is what masks are made of
