"""`Why`: what is wrong with a run, and what to try next, for a person on one screen and for a program as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchhook.core.findings import Finding, Report, Trial
from torchhook.render.words import counts, failure, finding_title, printable, scope, short, shown

SCHEMA = 1
"""The version of the dictionaries that `Why.to_dict` returns; it is raised when older readers would fail."""

_WIDE = 100  # columns
_OTHERS = 5  # findings that are shown on a line each, after the first
_EXPLAINED = 3  # consequences that are named
_SAID = ("cause", "line", "module")  # of the evidence: shown elsewhere


@dataclass(frozen=True)
class Why:
    """What is wrong with a run: each root cause with its evidence, its place, what was tried, and what to try next.

    `report` has the findings, worst first, and `lines` the source lines of the calls of layers.

    >>> found = Finding("TH501", "error", "each step is too large", "fc", 7, {"cause": "rate"}, "Lower the rate.")
    >>> why = Why("runs/net", "ended", 299, 30, Report((found,), "Net"), {"fc": "net.py:41: x = self.fc(x)"})
    >>> print(why)
    Net: 1 error, in runs/net, ended at step 299
    <BLANKLINE>
    error TH501  fc, step 7
      each step is too large
      cause     rate
      called    net.py:41: x = self.fc(x)
      next      Lower the rate.
    >>> why.to_dict()["findings"][0]["next"]
    'Lower the rate.'
    """

    run: str
    state: str
    last_step: int | None
    measured: int  # steps
    report: Report
    lines: Mapping[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the training did not fail, and no finding is as bad as the report's `fail_on`."""
        return self.report.ok and self.state != "failed"

    @property
    def exit_code(self) -> int:
        """The exit code for a program: 0 if `ok`, otherwise 1."""
        return 0 if self.ok else 1

    def to_dict(self) -> dict[str, Any]:
        """The answer as numbers, strings, lists and dicts, for JSON: ``render/why.schema.json`` describes it."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "model": self.report.model,
            "state": self.state,
            "last_step": self.last_step,
            "error": self._error(),
            "ok": self.ok,
            "fail_on": str(self.report.fail_on),
            "looked_at": {
                "measured_steps": self.measured,
                "rules": list(self.report.checked),
                "skipped": dict(self.report.skipped),
            },
            "findings": list(map(self._answer, self.report.findings)),
            "notes": list(self.report.notes),
        }

    def __str__(self) -> str:
        return "\n".join(map(printable, self._text()))

    def _answer(self, finding: Finding) -> dict[str, Any]:
        return {
            "code": finding.code,
            "severity": str(finding.severity),
            "message": finding.message,
            "cause": str(finding.evidence["cause"]) if finding.evidence.get("cause") else None,
            "site": finding.site,
            "module": finding.module or None,
            "line": self._line(finding) or None,
            "step": finding.step,
            "evidence": {name: value for name, value in finding.evidence.items() if name not in _SAID},
            "explains": [
                {"code": one.code, "site": one.site, "module": one.module or None, "message": one.message}
                for one in finding.affected
            ],
            "tried": None if finding.tried is None else finding.tried.to_dict(),
            "next": _next(finding),
        }

    def _error(self) -> dict[str, str | None] | None:
        error = self.report.about.get("error")
        if not isinstance(error, Mapping):
            return None
        return {name: str(error[name]) if error.get(name) else None for name in ("type", "message", "line")}

    def _line(self, finding: Finding) -> str:
        """The source line of the finding: its own, or that of the call of its module, or of its parameter's module."""
        owner = finding.site.rpartition(".")[0]
        return str(finding.evidence.get("line") or self.lines.get(finding.site) or self.lines.get(owner) or "")

    def _text(self) -> Iterator[str]:
        last = "" if self.last_step is None else f" at step {self.last_step}"
        line = f"{self.report.model}: {counts(self.report)}, in {self.run}, {self.state}{last}"
        yield short(" ".join(line.split()))  # there may be newlines in the name of a folder
        if raised := failure(self.report):
            yield _folded("raised", _relative(raised), "")
        if not self.report.findings:
            steps = f"{self.measured:,} measured step{'' if self.measured == 1 else 's'}"
            yield scope(self.report).replace(" checked", f" checked in {steps}")
        else:
            first, *others = self.report.findings
            yield ""
            yield from self._first(first)
            yield from self._others(others)
        yield from (_folded("note", note, "") for note in self.report.notes[:3])

    def _first(self, finding: Finding) -> Iterator[str]:
        yield short(f"{finding.severity} {finding.code}  {finding.where}")
        yield _filled(finding.message, "  ", "  ")
        numbers = {name: value for name, value in finding.evidence.items() if name not in _SAID}
        rest = len(finding.affected) - _EXPLAINED
        more = f" and {rest} more" if rest > 0 else ""
        facts = {
            "cause": str(finding.evidence.get("cause", "")),
            "called": _relative(self._line(finding)),
            "evidence": "  ".join(f"{name}={shown(value)}" for name, value in numbers.items()),
            "explains": ", ".join(map(finding_title, finding.affected[:_EXPLAINED])) + more,
            "tried": str(finding.tried or "").removeprefix("tried: "),
            "next": _next(finding),
        }
        yield from (_folded(name, fact) for name, fact in facts.items() if fact)

    def _others(self, findings: list[Finding]) -> Iterator[str]:
        if findings:
            yield ""
        for finding in findings[:_OTHERS]:
            yield short(f"{finding.severity} {finding_title(finding)}: {finding.message}", _WIDE)
        if len(findings) > _OTHERS:
            yield f"and {len(findings) - _OTHERS} more, which --json and Why.to_dict() list"


def _next(finding: Finding) -> str:
    """The next experiment: the repair that helped on a copy, else what the rule advises."""
    trial = finding.tried
    if trial is None:
        return finding.hint
    if trial.helped:
        return f"Train with this change: {_change(trial)}."
    return f"{finding.hint} ({trial.change}: no clear difference)".strip()


def _change(trial: Trial) -> str:
    return f"{trial.change} (loss {trial.repaired:.3g} instead of {trial.without:.3g} after {trial.steps} steps)"


def _folded(name: str, text: str, indent: str = "  ") -> str:
    first = f"{indent}{name:<10}"
    return _filled(text, first, " " * len(first))


def _filled(text: str, first: str, indent: str) -> str:
    """A text in at most three lines, the first of which begins with `first`, the others with `indent`."""
    return textwrap.fill(
        short(text), _WIDE, initial_indent=first, subsequent_indent=indent, max_lines=3, placeholder=" …"
    )


def _relative(text: str) -> str:
    """A text in which files below the current folder are named relative to it."""
    return text.replace(f"{Path.cwd()}/", "")
