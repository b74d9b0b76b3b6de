"""The one line with which a watched training ends: what was found, and where to look."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from shlex import quote

from torchhook.core.findings import Report
from torchhook.core.text import message_of
from torchhook.render.words import counts, short
from torchhook.rules.history import own_frame

_UNTIL = {"failed": " before it failed", "interrupted": " before it was interrupted"}


def ending(report: Report, steps: int, state: str, run: str | None, unwritten: str = "", missing: str = "") -> str:
    """The line; `unwritten` is from which step on the run could not be written, and why, and `missing` a gap before.

    >>> from torchhook.core.findings import Finding
    >>> found = Finding("TH501", "error", "each step is too large", "layer3.0.conv1")
    >>> print(ending(Report((found,)), 300, "ended", "runs/net"))
    torchhook: 1 error (TH501 at layer3.0.conv1) → torchhook dashboard runs/net
    >>> print(ending(Report(), 300, "ended", None))
    torchhook: nothing found in 300 steps
    >>> print(ending(Report(), 30, "failed", "runs/net", "from step 12 on: disk full"))
    torchhook: nothing found in 30 steps before it failed; the run could not be written from step 12 on: disk full
    """
    said = counts(report)
    if report.findings:
        first, more = report.findings[0], len(report.findings) - 1
        said += f" ({first.code} at {first.site or 'the model'}{f' and {more} more' if more else ''})"
    else:
        said += f" in {steps:,} step{'' if steps == 1 else 's'}"
    said += _UNTIL.get(state, "")
    if missing:
        said += f"; the run has a gap {missing}"
    if unwritten:
        said += f"; the run could not be written{' ' if unwritten.startswith('from step') else ': '}{unwritten}"
    elif run is not None:
        said += f" → torchhook dashboard {quote(run)}"
    return " ".join(short(f"torchhook: {said}", 1000).split())


def failure(error: BaseException) -> dict[str, str]:
    """What a training failed with, for its report: the type, the message, and the line of the user's code.

    >>> failure(ValueError("no data"))
    {'type': 'ValueError', 'message': 'no data', 'line': ''}
    """
    at = own_frame(error)
    line = "" if at is None else f"{at.filename}:{at.lineno}: {at.line}".removesuffix(": ")  # of exec, there is no text
    return {"type": type(error).__name__, "message": short(message_of(error), 1000), "line": short(line)}


def tell(line: str) -> None:
    """Print the line on standard error. A training does not fail if that is closed."""
    with suppress(Exception):  # without one, print would write to standard output
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def from_here(path: Path) -> str:
    """A path from the current folder on, if it is below it."""
    with suppress(OSError, ValueError):  # the current folder may be gone
        return str(path.absolute().relative_to(Path.cwd()))
    return str(path)
