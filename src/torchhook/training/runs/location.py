"""Opening a run for reading, while it is written or later. Nothing is created or changed."""

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
    """The file of the run at `path`, which is its folder or the file itself."""
    file = path if path.name == FILE else path / FILE
    if not file.is_file():
        raise RunError(
            f"there is no run in {str(path)!r} (no {FILE}); `torchhook runs list FOLDER` lists the runs in a folder"
        )
    return file


class Source:
    """The file of a run and a connection to it, which threads may share."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lock = threading.RLock()
        self._db: sqlite3.Connection | None = None
        self._is_frozen = False
        self._copy: TemporaryDirectory[str] | None = None

    def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """The result of `work` on a consistent state of the run, even while it is written."""
        with self._lock:
            try:
                return self._once(work)
            except RunError:
                raise
            except Exception:
                self.close()  # the run may have begun, ended or been replaced since it was opened
            try:
                return self._once(work)
            except RunError:
                raise
            except Exception as error:  # the file may contain anything
                self.close()
                raise RunError(
                    f"{str(self.file)!r} is not a run, or is corrupt ({error});"
                    f" `sqlite3 {self.file} .recover` may salvage it"
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
        # A writer always has a second file next to the first. Without one, SQLite is told not to create any, since it
        # may not even have the permission.
        self._is_frozen = not self._is_written()
        try:
            return _connected(self.file, "mode=ro&immutable=1" if self._is_frozen else "mode=ro")
        except sqlite3.OperationalError as error:
            if self._is_frozen or "locked" in str(error):
                raise
            return self._mended()

    def _is_written(self) -> bool:
        """Whether the run is being written, or its writer was killed."""
        return self._beside("-wal").exists() or self._beside("-journal").exists()

    def _mended(self) -> sqlite3.Connection:
        """Recover what a crash left behind, in a copy."""
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
    except BaseException:
        db.close()
        raise
    return db
