"""Opening a run for reading, while it is written or later. Nothing is created or changed."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import TypeVar

from torchhook.core.errors import RunError
from torchhook.core.text import in_units, printable
from torchhook.training.runs.schema import (
    APPLICATION,
    BESIDE,
    FILE,
    UNWRITTEN,
    VERSION,
    require_own_files,
    require_tables,
)

_PATIENCE = 10.0  # seconds to wait for a writer
_MOST = 10.0  # seconds that SQLite may take for one reading
_OPERATIONS = 10_000  # of SQLite, between two looks at the clock
_LARGEST = 2**29  # bytes that are copied to recover a run
_SPARSE = 8  # times what it takes on disk: a file that claims more than this is made of holes
_SMALL = 2**24  # bytes that are copied in any case

_LONGEST = 1000  # bytes of a reason
MARK = "torchhook: "
"""What the file begins with that says why a run could not be written, unless it is empty."""

Result = TypeVar("Result")


def located(path: Path) -> Path:
    """The file of the run at `path`, which is its folder or the file itself."""
    file = path if path.name == FILE else path / FILE
    if not is_file(file):
        if (reason := unwritten(file.parent)) is not None:
            raise RunError(f"the run in {str(file.parent)!r} could not be written{reason and f' {reason}'}")
        raise RunError(
            f"there is no run in {str(path)!r} (no {FILE}); `torchhook runs list FOLDER` lists the runs in a folder"
        )
    return file


def unwritten(folder: Path) -> str | None:
    """Since when and why the run in a folder could not be written, as far as there was room to say so; None if nothing
    says that. Others may have a file of the same name.
    """
    mark = folder / UNWRITTEN
    if mark.is_symlink() or not is_file(mark):
        return None
    try:
        with mark.open("rb") as opened:
            said = printable(opened.read(_LONGEST).decode(errors="replace")).strip()
    except OSError:
        return None
    return said.removeprefix(MARK) if not said or said.startswith(MARK) else None


def is_file(path: Path) -> bool:
    """Whether it is a file that can be looked at: the folder of another user may be closed."""
    try:
        return path.is_file()
    except OSError:
        return False


class Source:
    """The file of a run and a connection to it, which threads may share."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._beside_then: list[str] | None = None  # the files beside it, if the connection does not follow changes
        self._copy: TemporaryDirectory[str] | None = None

    def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of `work` on a consistent state of the run, even while it is written."""
        with self._lock:
            try:
                return self._once(work)
            except RunError:
                raise
            except Exception as error:
                self.close()  # the run may have begun, ended or been replaced since it was opened
                self._require_time(error)
            try:
                return self._once(work)
            except RunError:
                raise
            except Exception as error:  # the file may contain anything
                self.close()
                self._require_time(error)
                raise RunError(
                    f"{str(self.file)!r} is not a run, or is corrupt ({error});"
                    f" `sqlite3 {quote(str(self.file))} .recover` may salvage it"
                ) from error

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None
            if self._copy is not None:
                self._copy.cleanup()
                self._copy = None

    def _require_time(self, error: Exception) -> None:
        """Raise if the error is that the time was over; trying again would take as long."""
        if isinstance(error, sqlite3.OperationalError) and str(error) == "interrupted":
            raise RunError(f"{str(self.file)!r} takes too long to read: more than {_MOST:g} s") from error

    def _once(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._db is not None and self._beside_then not in (None, self._suffixes()):  # a writer has come, or gone
            self.close()
        if self._db is None:
            self._db = self._opened()
        self._db.execute("BEGIN")
        try:
            return work(self._db)
        finally:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")

    def _opened(self) -> sqlite3.Connection:
        require_own_files(self.file)
        # A writer always has other files next to the first. Without them, SQLite is told not to create any, since it
        # may not even have the permission; and it would create the second file of a write-ahead log.
        beside = self._beside_then = self._suffixes()
        if not beside or beside == ["-shm"]:
            return _connected(self.file, "mode=ro&immutable=1")
        if beside == ["-wal"]:
            return self._mended()
        try:
            opened = _connected(self.file, "mode=ro")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise
            return self._mended()
        self._beside_then = None
        return opened

    def _suffixes(self) -> list[str]:
        """Those of the files beside it: of a writer, or of one that was killed."""
        return [suffix for suffix in BESIDE if self._beside(suffix).exists()]

    def _mended(self) -> sqlite3.Connection:
        """Recover what a crash left behind, in a copy."""
        files = [file for suffix in ("", *BESIDE) if suffix != "-shm" and (file := self._beside(suffix)).exists()]
        size = sum(file.stat().st_size for file in files)
        if size > _LARGEST or (size > _SMALL and size > _SPARSE * sum(map(_on_disk, files))):
            raise RunError(
                f"{str(self.file)!r} was not closed, and takes {in_units(size)}, which is too much to recover it in a"
                f" copy; `sqlite3 {quote(str(self.file))} .tables` recovers it in place"
            )
        self._copy = TemporaryDirectory(prefix="torchhook-run-")
        for file in files:
            shutil.copyfile(file, Path(self._copy.name, file.name))
        copied = Path(self._copy.name, FILE)
        require_own_files(copied)  # the journal may have changed meanwhile
        return _connected(copied, "mode=rw")

    def _beside(self, suffix: str) -> Path:
        return self.file.with_name(FILE + suffix)


def _on_disk(file: Path) -> int:
    """The bytes that a file takes: it may claim more, which are holes."""
    found = file.stat()
    return 512 * found.st_blocks if hasattr(found, "st_blocks") else found.st_size


class _Clock:
    """Interrupts a reading that takes too long: a file may be made so that it never ends, or is slow a thousand times.

    Only the time inside of SQLite counts, not that of what is done with the rows.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._spent, self._last = 0.0, time.monotonic()
        db.set_trace_callback(self._start)
        db.set_progress_handler(self._is_over, _OPERATIONS)

    def _start(self, statement: str) -> None:
        self._last = time.monotonic()
        if statement == "BEGIN":
            self._spent = 0.0

    def _is_over(self) -> bool:
        now = time.monotonic()
        self._spent, self._last = self._spent + now - self._last, now
        return self._spent > _MOST


def _connected(file: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{file.absolute().as_uri()}?{how}", uri=True, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
    )
    try:
        _Clock(db)
        db.execute("PRAGMA trusted_schema = OFF")  # never call functions that the schema of the file names
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise RunError(f"{str(file)!r} is not a run of torchhook")
        if version > VERSION:
            raise RunError(
                f"{str(file)!r} was written by a newer torchhook (version {version} of the tables; this one reads up to"
                f" {VERSION}); update torchhook to read it"
            )
        require_tables(db, file)
    except BaseException:
        db.close()
        raise
    return db
