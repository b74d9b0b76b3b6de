"""Opening a run to read it, while others write it or after they are gone: nothing is created, nothing changed."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from torchhook.core.errors import RunError
from torchhook.training.runs.schema import APPLICATION, BESIDE, FILE, VERSION

_PATIENCE = 10.0  # seconds

Result = TypeVar("Result")


def located(path: Path) -> Path:
    """The file of the run that `path` names: its folder, or the file itself."""
    file = path if path.name == FILE else path / FILE
    if not file.is_file():
        raise RunError(
            f"there is no run in {str(path)!r}, for it has no {FILE}; torchhook runs list FOLDER shows those there are"
        )
    return file


class Source:
    """The file of a run, and a connection to it; threads may share it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._is_frozen = False
        self._copy: TemporaryDirectory[str] | None = None

    def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` makes of the run at one moment, whoever writes meanwhile."""
        with self._lock:
            try:
                return self._once(work)
            except RunError:
                raise
            except Exception:
                self.close()  # it may have been begun, ended or replaced since it was opened
            try:
                return self._once(work)
            except RunError:
                raise
            except Exception as error:  # whatever comes of reading what somebody else may have made
                self.close()
                raise RunError(
                    f"{str(self.file)!r} is no run, or a broken one ({error}); what is left of it, the program sqlite3"
                    " may save with its command .recover"
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

    def _once(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        if self._db is not None and self._is_frozen and self._is_written():
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
        # Nobody writes without a file beside the one. Where there is none, SQLite is told not to make one either, for
        # which it may not even have the right.
        self._is_frozen = not self._is_written()
        try:
            return _connected(self.file, "mode=ro&immutable=1" if self._is_frozen else "mode=ro")
        except sqlite3.OperationalError as error:
            if self._is_frozen or "locked" in str(error):
                raise
            return self._mended()

    def _is_written(self) -> bool:
        """Whether somebody writes, or was killed when he did."""
        return self._beside("-wal").exists() or self._beside("-journal").exists()

    def _mended(self) -> sqlite3.Connection:
        """What a crash left behind and can be read only after it was put in order, is: in a copy."""
        self._copy = TemporaryDirectory(prefix="torchhook-run-")
        for suffix in ("", *BESIDE):
            if suffix != "-shm" and (file := self._beside(suffix)).exists():
                shutil.copyfile(file, Path(self._copy.name, file.name))
        return _connected(Path(self._copy.name, FILE), "mode=rw")

    def _beside(self, suffix: str) -> Path:
        return self.file.with_name(FILE + suffix)


def _connected(file: Path, how: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{file.absolute().as_uri()}?{how}", uri=True, timeout=_PATIENCE, isolation_level=None, check_same_thread=False
    )
    try:
        db.execute("PRAGMA trusted_schema = OFF")  # what others wrote into the schema is not called
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise RunError(f"{str(file)!r} is no run of torchhook")
        if version > VERSION:
            raise RunError(
                f"{str(file)!r} was written by a newer torchhook (version {version} of the tables, and {VERSION} is"
                " known here); update torchhook to read it"
            )
    except BaseException:
        db.close()
        raise
    return db
