"""`summarize`: what a list shows of a run, read at once and cheaply, also from a run that is broken."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.core.findings import Finding, Severity
from torchhook.training.runs.location import is_file, unwritten
from torchhook.training.runs.run import Run
from torchhook.training.runs.schema import FILE, UNWRITTEN

POINTS = 60  # of the loss curve

UNREADABLE = "unreadable"
"""The state of a run that cannot be read."""


@dataclass(frozen=True)
class Summary:
    """A run as one line of a list. If it cannot be read, `error` says why, and `started` is the time of its file.

    `name` is that of its folder, which may contain any character. `duration` is in seconds, up to now if it is running;
    `losses` are at most 60, by step, with the first and the last; `finding` is the first of the worst ones, and
    `errors` is how many findings are errors.
    """

    name: str
    started: float
    state: str = UNREADABLE
    model: str = ""
    duration: float | None = None
    last_step: int | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    findings: int = 0
    finding: Finding | None = None
    size: int = 0
    error: str = ""
    errors: int = 0

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step that has one."""
        return next(reversed(list(self.losses.values())), None)


def summarize(folder: str | os.PathLike[str]) -> Summary:
    """The summary of the run in `folder`. The file is opened, read and closed; a run that is broken raises nothing.

    >>> import tempfile
    >>> from torchhook.training.runs import RunLog
    >>> folder = Path(tempfile.mkdtemp())
    >>> RunLog(folder / "net").begin({"model": "Net"})
    >>> found = summarize(folder / "net")
    >>> found.name, found.model, found.state, found.last_loss
    ('net', 'Net', 'running', None)
    >>> _ = (folder / "net" / FILE).write_text("garbage")
    >>> summarize(folder / "net").error
    "'run.sqlite' is not a run, or is corrupt (file is not a database); `sqlite3 run.sqlite .recover` may salvage it"
    """
    folder = Path(folder)
    try:
        with Run(folder) as run:
            return _summary(run, folder.name)
    except RunError as error:
        is_lost = not is_file(folder / FILE) and unwritten(folder) is not None
        state, file = (UNWRITTEN, UNWRITTEN) if is_lost else (UNREADABLE, FILE)
        return Summary(folder.name, _written(folder / file), state, error=str(error).replace(f"{folder}{os.sep}", ""))


def _summary(run: Run, name: str) -> Summary:
    findings, state, started = run.current_findings, run.state, run.started
    end = time.time() if state == "running" else run.ended or next(reversed(run.times.values()), None)
    return Summary(
        name,
        started,
        state,
        run.model,
        None if end is None else max(0.0, end - started),
        run.last_step,
        run.loss_curve(POINTS),
        len(findings),
        max(findings, key=lambda finding: finding.severity.rank, default=None),
        run.size,
        errors=sum(finding.severity == Severity.ERROR for finding in findings),
    )


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:  # it was deleted meanwhile
        return 0.0
