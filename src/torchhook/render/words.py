"""Values and names as readable text, shared by all formats for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.core.text import printable as printable


def spelled(number: float) -> str:
    """NaN or an infinity, as JavaScript spells it.

    >>> spelled(math.nan), spelled(-math.inf)
    ('NaN', '-Infinity')
    """
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def shown(value: Any) -> str:
    """A value of the evidence or of a layer, as short text.

    >>> shown(0.61234567), shown(math.inf), shown([1, 2.5]), shown({"low": 1e-9})
    ('0.6123', 'Infinity', '1, 2.5', 'low: 1e-09')
    """
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else spelled(value)
    if isinstance(value, Mapping):
        return short(", ".join(f"{key}: {shown(item)}" for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        return short(", ".join(map(shown, value)))
    return short(str(value))


def short(text: str, length: int = 400) -> str:
    """`text` without unprintable characters, cut to `length`.

    >>> short("abcdef", 4)
    'abc…'
    """
    return printable(text) if len(text) <= length else printable(text[: length - 1]) + "…"


def heading(kind: str) -> str:
    """The class of a result, as the heading of its page.

    >>> heading("Likeness"), heading("Sweep")
    ('Similarity', 'Sweep')
    """
    return "Similarity" if kind == "Likeness" else kind


def finding_title(finding: Finding) -> str:
    """The code and the site of a finding, for a list.

    >>> finding_title(Finding("TH201", "error", "61 % of the units never fire", site="relu"))
    'TH201 at relu'
    """
    return short(f"{finding.code} at {finding.place}")


def since(finding: Finding) -> int | None:
    """The step at which something was found, or else the first one of its consequences; None if none is known.

    >>> since(Finding("TH402", "error", "", affected=(Finding("TH403", "warning", "", step=180),)))
    180
    """
    steps = [other.step for other in finding.affected if other.step is not None]
    return finding.step if finding.step is not None else min(steps, default=None)


def counts(report: Report) -> str:
    """The number of findings: the headline without the model.

    >>> counts(Report(model="Net"))
    'nothing found'
    """
    return report.headline.removeprefix(f"{report.model}: ")


def scope(report: Report) -> str:
    """How many rules, or contracts, were checked, and how many were skipped.

    >>> scope(Report(checked=("TH101",), skipped={"TH301": "no optimizer"}))
    '1 rule checked, 1 skipped'
    """
    skipped = len(report.skipped)
    text = f"{_counted(report, len(report.checked))} checked"
    return f"{text}, {skipped} skipped" if skipped else text


def left_out(report: Report) -> str:
    """How many rules, or contracts, were skipped.

    >>> left_out(Report(skipped={"TV104": "it does not claim to be causal"}))
    '1 contract'
    """
    return _counted(report, len(report.skipped))


def _counted(report: Report, number: int) -> str:
    noun = "contract" if any(code.startswith("TV") for code in (*report.checked, *report.skipped)) else "rule"
    return f"{number} {noun}{'' if number == 1 else 's'}"


def verdict(report: Report) -> str:
    """Whether the report passed or failed; a training that did not end, or not well, has not passed.

    >>> verdict(Report()), verdict(Report(about={"state": "killed"}))
    ('passed', 'unfinished')
    """
    if not report.ok:
        return "failed"
    return "passed" if report.about.get("state", "ended") == "ended" else "unfinished"


def failure(report: Report) -> str:
    """What the training failed with, and where, on one line; empty if it did not fail, or that is not known.

    >>> failure(Report(about={"error": {"type": "ValueError", "message": "no data", "line": "train.py:3: load()"}}))
    'ValueError: no data, at train.py:3: load()'
    """
    error = report.about.get("error")
    if not isinstance(error, Mapping):
        return ""
    kind, message, line = (str(error.get(name, "")) for name in ("type", "message", "line"))
    said = ": ".join(filter(None, [kind, message])) + (f", at {line}" if line else "")
    return short(" ".join(said.split()))


def header(report: Report) -> list[str]:
    """Where a report comes from, and what the training failed with, in at most four lines.

    >>> header(Report(about={"run": "runs/net", "versions": {"torch": "2.13"}, "command": "train.py --fast"}))
    ['runs/net', 'torch 2.13', '$ train.py --fast']
    """
    about = report.about
    versions = about.get("versions")
    named = [f"{name} {version}" for name, version in versions.items()] if isinstance(versions, Mapping) else []
    first = [str(about[name]) for name in ("run", "started", "device", "ranks", "watching") if about.get(name)]
    lines = [", ".join(first), ", ".join(named), f"$ {about['command']}" if about.get("command") else ""]
    if failed := failure(report):
        lines.append(f"failed with {failed}")
    return [short(line) for line in lines if line]


def span(report: Report) -> str:
    """The steps over which the layers were measured, if known.

    >>> span(Report(span=(200, 1395))), span(Report(span=(7, 7)))
    ('Measured from step 200 to step 1,395.', 'Measured at step 7.')
    """
    if report.span is None:
        return ""
    first, last = report.span
    return f"Measured at step {last:,}." if first == last else f"Measured from step {first:,} to step {last:,}."


def by_reason(skipped: Mapping[str, str]) -> dict[str, list[str]]:
    """The codes of the skipped rules, by reason.

    >>> by_reason({"TH301": "no optimizer", "TH302": "no optimizer"})
    {'no optimizer': ['TH301', 'TH302']}
    """
    reasons: dict[str, list[str]] = {}
    for code, reason in skipped.items():
        reasons.setdefault(printable(reason), []).append(printable(code))
    return reasons
