"""The report as Markdown for the summary of a CI job, kept well below GitHub's limit of 1 MiB."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchhook.core.findings import Finding, Report
from torchhook.render.words import by_reason, finding_title, header, scope, short, verdict

MARKS = {"error": "❌", "warning": "⚠️", "info": "ℹ️"}
_VERDICTS = {"passed": "✅", "failed": "❌", "unfinished": "⚠️"}
TABLE, FOLDED, REST = 500_000, 300_000, 100_000  # bytes; the rest of the 1 MiB is for other steps
AFFECTED = 50

T = TypeVar("T")

_SPECIAL = re.compile(r"([\\`*_\[\]|~$#@])")


def markdown(report: Report, *, verbose: bool = False) -> str:
    """A report as Markdown; with `verbose`, it also says which rules were skipped, and why.

    >>> print(markdown(Report((Finding("TH201", "error", "61 % never fire", site="relu", hint="Warm up."),), "Net")))
    ## ❌ Net: 1 error
    <BLANKLINE>
    0 rules checked
    <BLANKLINE>
    | | code | where | what | what to do |
    |---|---|---|---|---|
    | ❌ error | TH201 | <code>relu</code> | 61 % never fire | Warm up. |
    <BLANKLINE>
    """
    blocks = [
        f"## {_VERDICTS[verdict(report)]} {escaped(report.headline)}",
        "\n\n".join(map(escaped, header(report))),
        escaped(scope(report)),
        _table(report),
        _fit(_folded, [finding for finding in report.findings if finding.affected], FOLDED),
        _notes(report, verbose),
    ]
    return "\n\n".join(filter(None, blocks)) + "\n"


def escaped(text: str) -> str:
    """`text` on one line, without markup of its own.

    >>> escaped("a|b <script>")
    'a\\\\|b &lt;script&gt;'
    """
    text = _SPECIAL.sub(r"\\\1", short(" ".join(text.split()), 1000))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _table(report: Report) -> str:
    if not report.findings:
        return ""
    header = "| | code | where | what | what to do |\n|---|---|---|---|---|\n"
    return header + _fit(_row, report.findings, TABLE)


def _row(finding: Finding) -> str:
    mark = f"{MARKS[finding.severity]} {finding.severity}"
    step = "" if finding.step is None else f"step {finding.step}"
    site = _code(finding.site) if finding.site else "the model"
    module = f" ({escaped(finding.module)})" if finding.module else ""
    where = ", ".join(filter(None, [f"{site}{module}", step]))
    advice = " ".join(map(escaped, finding.advice))
    return f"| {mark} | {escaped(finding.code)} | {where} | {escaped(finding.message)} | {advice} |"


def _folded(finding: Finding) -> str:
    others = [f"- {escaped(finding_title(other))}: {escaped(other.message)}" for other in finding.affected[:AFFECTED]]
    rest = len(finding.affected) - len(others)
    summary = f"<summary>{escaped(finding_title(finding))} explains {len(finding.affected)} more</summary>"
    return "\n".join(["<details>", summary, "", *others, *([_more(rest)] if rest else []), "", "</details>", ""])


def _notes(report: Report, verbose: bool) -> str:
    skipped = by_reason(report.skipped).items() if verbose else ()
    lines = [f"Skipped {', '.join(codes)}: {reason}" for reason, codes in skipped]
    return _fit(lambda note: f"- {escaped(note)}", [*lines, *report.notes], REST)


def _fit(render: Callable[[T], str], items: Sequence[T], room: int) -> str:
    """As many rendered items as fit into `room` bytes, and how many are left out."""
    kept: list[str] = []
    for item in items:
        block = render(item)
        room -= len(block.encode(errors="replace")) + 1
        if room < 0:
            return "\n".join([*kept, "", _more(len(items) - len(kept))])
        kept.append(block)
    return "\n".join(kept)


def _more(n: int) -> str:
    return f"… and {n} more"


def _code(text: str) -> str:
    return f"<code>{escaped(text)}</code>"
