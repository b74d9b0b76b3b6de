"""What the list of runs shows: a summary of each run, read again when its file has changed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import NamedTuple

from torchhook.training.runs.schema import FILE
from torchhook.training.runs.summary import Summary, summarize

_AGAIN = 60.0  # seconds after which a run that is said to be running is read again: no file tells that it was killed

Stamp = tuple[int, ...]
"""Numbers that change when a run is written."""


class Line(NamedTuple):
    """A run in the list. Its `summary` is None until it was read; its `version` grows when that changes."""

    name: str
    written: float
    version: int
    summary: Summary | None = None
    stamp: Stamp = ()
    read: float = 0.0


class Catalog:
    """A line per run, newest first. Runs are opened one at a time, and closed at once.

    >>> import tempfile
    >>> from torchhook.training.runs import RunLog
    >>> root = Path(tempfile.mkdtemp())
    >>> RunLog(root / "first").begin({"model": "Net"})
    >>> catalog = Catalog(root, lambda: {"first": (root / "first" / FILE).stat()})
    >>> catalog.refresh()
    >>> [line.summary.model for line in catalog.lines()]
    ['Net']
    """

    def __init__(self, root: Path, files: Callable[[], Mapping[str, os.stat_result]]) -> None:
        self.root = root
        self.files = files
        self.edition = 0  # grows when runs come or go; otherwise only lines change
        self._versions = count(1)
        self._lines: dict[str, Line] = {}
        self._stale: dict[str, Stamp] = {}  # runs to read, the newest last
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        """Whether all runs were read."""
        return not self._stale

    def lines(self, after: int = 0) -> list[Line]:
        """The lines that changed since version `after`."""
        with self._lock:
            return [line for line in self._lines.values() if line.version > after]

    def refresh(self, seconds: float = float("inf")) -> None:
        """List the folder, and read what has changed, newest first, for at most this long."""
        end = time.monotonic() + seconds
        self._list()
        while time.monotonic() < end and self._read():
            pass

    def _list(self) -> None:
        files = self.files()
        stamps = {name: _stamp(f"{self.root}/{name}", file) for name, file in files.items()}
        with self._lock:
            if files.keys() != self._lines.keys():
                known, self.edition = self._lines, self.edition + 1
                self._lines = {
                    name: known.get(name) or Line(name, file.st_mtime, next(self._versions))
                    for name, file in files.items()
                }
            self._stale = {name: stamps[name] for name in reversed([*files]) if self._is_stale(name, stamps[name])}

    def _is_stale(self, name: str, stamp: Stamp) -> bool:
        line = self._lines[name]
        if line.summary is None or line.stamp != stamp:
            return True
        return line.summary.state == "running" and time.monotonic() > line.read + _AGAIN

    def _read(self) -> bool:
        """Read the newest run that is stale; whether there was one."""
        with self._lock:
            if not self._stale:
                return False
            name, stamp = self._stale.popitem()
        summary = summarize(self.root / name)
        with self._lock:
            line = self._lines.get(name)
            if line is not None:
                version = line.version if summary == line.summary else next(self._versions)
                self._lines[name] = Line(name, line.written, version, summary, stamp, time.monotonic())
        return True


def stat_of(file: str) -> os.stat_result | None:
    """What the system says of a file; None if it is not there."""
    try:
        return os.stat(file)  # noqa: PTH116 - a folder may have thousands, and a Path takes longer than the call
    except OSError:
        return None


def _stamp(folder: str, file: os.stat_result) -> Stamp:
    log = stat_of(f"{folder}/{FILE}-wal")  # which a writer appends to first
    own = file.st_ino, file.st_size, file.st_mtime_ns
    return own if log is None else (*own, log.st_size, log.st_mtime_ns)
