"""The report in a terminal: a few lines per finding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.core.optional import require
from torchhook.render.words import by_reason, finding_title, header, printable, scope, shown, verdict

STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}
WIDEST = 110  # columns: longer lines are hard to follow
AFFECTED = 3
_SAID = ("cause", "module")  # of the evidence: in the message, and beside the site

Piece = tuple[str, str]  # text and style
_VERDICTS: dict[str, Piece] = {
    "passed": ("passed", "bold green"),
    "failed": ("FAILED", "bold red"),
    "unfinished": ("unfinished", "bold yellow"),
}
Line = tuple[int, list[Piece]]  # indentation and text


def terminal(report: Report, console: Any = None, *, verbose: bool = False) -> None:
    """Print a report to a ``rich.console.Console``, by default to standard output; only a terminal gets colours.

    With `verbose`, it also says which rules were skipped, and why.

    >>> terminal(Report((Finding("TH201", "error", "61 % never fire", site="relu", hint="Warm up."),), "Net"))
    FAILED  Net: 1 error
    <BLANKLINE>
    error TH201  relu
      61 % never fire
      > Warm up.
    <BLANKLINE>
    0 rules checked
    """
    console = console or require("rich.console", "cli", "a report in the terminal").Console()
    for indent, pieces in _lines(report, verbose):
        _print(console, indent, pieces)


def _lines(report: Report, verbose: bool) -> Iterator[Line]:
    yield 0, [_VERDICTS[verdict(report)], ("  ", ""), (report.headline, "bold")]
    for line in header(report):
        yield 0, [(line, "dim")]
    for finding in report.findings:
        yield 0, []
        yield from _finding_lines(finding)
    yield 0, []
    yield 0, [(scope(report), "dim")]
    for reason, codes in by_reason(report.skipped).items() if verbose else ():
        yield 2, [(f"{', '.join(codes)}: {reason}", "dim")]
    for note in report.notes:
        yield 0, [(f"note: {note}", "dim")]


def _finding_lines(finding: Finding) -> Iterator[Line]:
    yield 0, [(f"{finding.severity} {finding.code}", STYLES[finding.severity]), ("  ", ""), (finding.where, "bold")]
    yield 2, [(finding.message, "")]
    numbers = {name: value for name, value in finding.evidence.items() if name not in _SAID}
    if numbers:
        yield 2, [("  ".join(f"{name}={shown(value)}" for name, value in numbers.items()), "dim")]
    if finding.affected:
        yield 2, [(f"explains {_few(finding.affected)}", "dim")]
    if finding.hint:
        yield 2, [(f"> {finding.hint}", "green")]
    if finding.tried:
        yield 2, [(str(finding.tried), "green" if finding.tried.helped else "dim")]


def _few(findings: tuple[Finding, ...]) -> str:
    titles = list(dict.fromkeys(map(finding_title, findings)))
    rest = f" and {len(titles) - AFFECTED} more" if len(titles) > AFFECTED else ""
    return ", ".join(titles[:AFFECTED]) + rest


def _print(console: Any, indent: int, pieces: list[Piece]) -> None:
    """Print one line, wrapped if it is too long, with every part indented."""
    text = require("rich.text", "cli", "a report in the terminal").Text()
    for piece, style in pieces:
        text.append(_encodable(printable(piece), console.encoding), style)
    for part in text.wrap(console, min(console.width, WIDEST) - indent, overflow="fold"):
        part.rstrip()
        console.print(" " * indent, part, sep="", highlight=False, soft_wrap=True)


def _encodable(text: str, encoding: str) -> str:
    return text.encode(encoding, errors="replace").decode(encoding)
