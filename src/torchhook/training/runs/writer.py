"""`RunLog`: the log that writes a run to disk. Trouble with the disk never stops the training."""

from __future__ import annotations

import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from torchhook.captures.pictures import png
from torchhook.core.errors import RunError
from torchhook.core.findings import Finding, Report
from torchhook.core.text import in_units, warn
from torchhook.render.palette import NONFINITE
from torchhook.render.words import short
from torchhook.training.logs import Entry, Log
from torchhook.training.runs.blobs import packed
from torchhook.training.runs.database import Database
from torchhook.training.runs.groups import Group, grouped
from torchhook.training.runs.location import MARK
from torchhook.training.runs.schema import FILE, SAMPLES, UNWRITTEN

_MOST_LOSSES = 200_000
_MOST_SAMPLES = 200


class RunLog(Log):
    """Writes a run into `folder`, which is created if need be; an existing run is continued.

    `max_bytes` is the size limit of the folder: three quarters for statistics, an eighth for SQLite's write-ahead
    log, an eighth for samples of feature maps. Beyond that, older steps are thinned out evenly; the newest quarter, the
    first step and those that findings name go last. At most 200,000 losses and 200 samples are kept. (A long-lived
    reader may exceed the limit temporarily.)

    After a crash of the process, all that was written is there; after one of the machine, all but the last seconds. If
    the disk is full or the folder read-only, what cannot be written is lost with a warning, and later writes are tried.
    `unwritten` says from which step on, and why; a run that ends like this has the state ``"unwritten"``.

    >>> import tempfile
    >>> from torchhook.core.findings import Report
    >>> from torchhook.training.runs import Run
    >>> from torchhook.stats.reading import Snapshot
    >>> log = RunLog(Path(tempfile.mkdtemp()) / "net")
    >>> log.begin({"model": "Net"})
    >>> log.write(Entry(0, 0.0, Snapshot({}), losses={0: 0.7}))
    >>> log.end(Report(model="Net"), "ended")
    >>> with Run(log.folder) as run:
    ...     run.model, run.state, run.losses
    ('Net', 'ended', {0: 0.7})
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = 2**28) -> None:
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 2**20:
            raise ValueError(f"max_bytes must be an integer of at least 1048576 (1 MiB), not {max_bytes!r}")
        self.folder = Path(folder)
        eighth = max_bytes // 8
        self._most_bytes, self._most_log, self._most_samples = 6 * eighth, eighth, eighth
        self._about: Mapping[str, Any] = {}
        self._database: Database | None = None
        self._is_open = True
        self._step = 0
        self.unwritten = ""
        self.missing = ""  # the same of the first gap, after which writing went on
        self._warned: set[str] = set()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Create the folder and the file."""
        self._about = dict(about)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._is_open, self.unwritten = False, _reason(error)
            where = short(str(self.folder), 200)
            warn(f"no run is recorded: cannot create {where!r} ({_reason(error)}); the training goes on")
            return
        with suppress(OSError):
            (self.folder / UNWRITTEN).unlink(missing_ok=True)  # if this run is continued
        self._do("the run", lambda database: None)

    def write(self, entry: Entry) -> None:
        """Write a measured step, and make room for the next."""
        self._step = entry.step
        what = f"what was measured in step {entry.step}"
        groups = self._fitting(grouped(entry))
        # Losses alone may fit on a disk that has no room for a measured step.
        if self._do(what, lambda database: database.add(entry, groups)) and entry.snapshot and self.unwritten:
            self.missing, self.unwritten = self.missing or self.unwritten.replace(" on:", f" to {entry.step}:"), ""
        if entry.maps:
            self._do(f"the samples of step {entry.step}", lambda database: self._draw(database, entry))
        if entry.wires:
            self._do("how the layers are connected", lambda database: database.tell({"wires": list(entry.wires)}))
        if entry.lines:
            self._do("where the layers are called", lambda database: database.tell({"lines": dict(entry.lines)}))
        if entry.shapes:
            self._do("the shapes of the outputs", lambda database: database.tell({"shapes": dict(entry.shapes)}))
        losses = min(_MOST_LOSSES, self._most_bytes // 256)
        self._do(what, lambda database: database.thin(self._most_bytes, losses))

    def found(self, finding: Finding) -> None:
        """Write a finding; it replaces one with the same code and site."""
        self._do(f"the finding {finding.code}", lambda database: database.find(finding, self._step))

    def keep(self, report: Report, step: int) -> None:
        """Write the report as of a step; it replaces the previous one."""
        self._do("the report", lambda database: database.keep(report, step))
        if "watching" in report.about:
            self._do("the report", lambda database: database.tell({"watching": report.about["watching"]}))

    def end(self, report: Report, state: str) -> None:
        """Write the report and the final state, and leave one plain file."""
        self.keep(report, self._step)
        ended = self._do("the end", lambda database: database.end(UNWRITTEN if self.unwritten else state))
        if self._is_open and not ended:
            mark = self.folder / UNWRITTEN
            with suppress(OSError):  # an empty file takes no room on a full disk
                mark.touch()
                mark.write_text(f"{MARK}{self.unwritten}\n", encoding="utf-8")
        self._is_open = False
        self._close()

    def _do(self, what: str, work: Callable[[Database], None]) -> bool:
        """Work on the database; whether it was done. If not, `what` is lost with a warning, and the next call reopens
        the file.
        """
        if not self._is_open:
            return False
        try:
            work(self._opened())
        except (sqlite3.Error, OSError, RunError) as error:
            self._close()
            reason = _reason(error)
            self.unwritten = self.unwritten or f"from step {self._step} on: {reason}"
            self._warn(
                "lost",
                f"the run in {str(self.folder)!r} cannot be written ({reason}): {what} is lost; the training goes on,"
                " and writing is tried again",
            )
            return False
        return True

    def _opened(self) -> Database:
        file = self.folder / FILE
        if self._database is not None and not file.exists():
            self._close()
            self._warn("deleted", f"{str(file)!r} was deleted; its content is lost, and a new file is started")
        if self._database is None:
            self._database = Database(file, self._most_log)
            self._database.begin(self._about)
        return self._database

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    def _fitting(self, groups: Iterable[Group]) -> list[tuple[Group, bytes]]:
        """The groups that fit into the room for one step, smallest first, each with its blob."""
        fitting, room = [], self._most_bytes // 8
        for group, blob in sorted(
            ((group, packed(group.states[0])) for group in groups), key=lambda pair: len(pair[1])
        ):
            room -= len(blob)
            if room >= 0:
                fitting.append((group, blob))
            else:
                self._warn(
                    group.stat,
                    f"{group.stat!r} of {len(group.places)} places takes {in_units(len(blob))} per step, which is too"
                    f" much for {str(self.folder)!r} and was not written; raise max_bytes, or measure fewer places",
                )
        return fitting

    def _draw(self, database: Database, entry: Entry) -> None:
        folder = self.folder / SAMPLES
        folder.mkdir(exist_ok=True)
        for number, (path, maps) in enumerate(entry.maps.items()):
            if maps.dim() == 3 and maps.numel():
                file = folder / f"{entry.step:08}-{number}.png"
                _replace(file, png(maps, NONFINITE))
                database.add_sample(entry.step, path, file, *_extremes(maps))
        for name in database.thin_samples(self._most_samples, _MOST_SAMPLES):
            (folder / Path(name).name).unlink(missing_ok=True)

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warn(message)


def _reason(error: Exception) -> str:
    """The error without the path that it is about, which may be what is too long."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def _extremes(maps: Tensor) -> tuple[float, float]:
    finite = maps[maps.isfinite()].double()
    return (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)


def _replace(file: Path, data: bytes) -> None:
    """Write to another name, then rename, so that a picture is never half written."""
    draft = file.with_name(f".{file.name}")
    try:
        draft.write_bytes(data)
        draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)
