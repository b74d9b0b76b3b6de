"""The tables of a run, and how its file is created: completely, or not at all."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.training.runs.owners import this_process

FILE = "run.sqlite"
DRAFT = f".{FILE}."  # and the id of the process that is creating the file
SAMPLES = "samples"
UNWRITTEN = "unwritten"  # a state, and the file that says so where the tables could not
APPLICATION = 0x74687275  # "thru": identifies the file, in its header
VERSION = 1  # of the tables; it grows when an older reader would fail
_JOURNAL = bytes.fromhex("d9d505f920a163d7")  # begins a journal of SQLite, and ends one that names another
_PAGE = 8192  # bytes: the blobs of most models fill such pages well

BESIDE = ("-wal", "-shm", "-journal")
"""The suffixes of the files that SQLite puts next to a database."""

RANKS = "CREATE TABLE IF NOT EXISTS ranks (step INTEGER PRIMARY KEY, facts TEXT, places TEXT, data BLOB)"
"""What each of several ranks saw; runs of earlier versions have no such table."""

_TABLES = f"""
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);  -- as JSON
CREATE TABLE life (id INTEGER PRIMARY KEY CHECK (id = 0), state TEXT, started REAL, ended REAL, owner TEXT);
CREATE TABLE places (
    id INTEGER PRIMARY KEY, path TEXT, port TEXT, label TEXT, note TEXT,
    stats TEXT,  -- names and settings, as JSON
    failed TEXT,  -- why statistics are missing, as JSON
    UNIQUE (path, port)
);
CREATE TABLE windows (step INTEGER PRIMARY KEY, time REAL, rate REAL);  -- the measured steps
CREATE TABLE losses (step INTEGER PRIMARY KEY, loss REAL);  -- of every step; NaN is NULL
CREATE TABLE layouts (  -- what a blob holds: the statistic, port, shape and places of its states
    id INTEGER PRIMARY KEY, stat TEXT, port TEXT, shape TEXT, places TEXT, UNIQUE (stat, port, shape, places)
);
CREATE TABLE states (step INTEGER, layout INTEGER, data BLOB, PRIMARY KEY (step, layout));
CREATE TABLE findings (code TEXT, site TEXT, step INTEGER, seen INTEGER, data TEXT, UNIQUE (code, site));
CREATE TABLE samples (step INTEGER, path TEXT, file TEXT PRIMARY KEY, size INTEGER, low REAL, high REAL);
{RANKS};
CREATE TABLE report (id INTEGER PRIMARY KEY CHECK (id = 0), step INTEGER, data TEXT);
"""


def create(file: Path) -> None:
    """Create a run that is empty except for its owner.

    It is created under another name and renamed, so that the file is always a whole run, also after a crash. Where a
    write-ahead log does not work, as on some network disks, it has none.
    """
    with _draft(file) as draft:
        try:
            _draw(draft, "wal")
        except sqlite3.OperationalError:
            remove(draft)
            _draw(draft, "delete")
        draft.replace(file)


def can_log_ahead(file: Path) -> bool:
    """Whether a database next to `file` can have a write-ahead log; trying with `file` itself might break it."""
    with _draft(file) as draft:
        try:
            _draw(draft, "wal")
        except sqlite3.OperationalError:
            return False
        return True


def require_own_files(file: Path) -> None:
    """Raise if SQLite, when it opens the run, would read, change or delete other files than those of the run.

    It follows links, waits for pipes, and deletes the file that a journal of several databases names.
    """
    for beside in (file.with_name(file.name + suffix) for suffix in ("", *BESIDE)):
        try:
            found = beside.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(found.st_mode):
            raise RunError(f"{str(file)!r} is refused: {beside.name!r} is a link, which may lead anywhere")
        if not stat.S_ISREG(found.st_mode):
            raise RunError(f"{str(file)!r} is refused: {beside.name!r} is not a plain file")
        if beside != file and found.st_nlink > 1:
            raise RunError(f"{str(file)!r} is refused: {beside.name!r} is also a file elsewhere (a hard link)")
    if _end(file.with_name(f"{file.name}-journal")) == _JOURNAL:
        raise RunError(f"{str(file)!r} is refused: its journal names another file, which SQLite would delete")


def require_tables(db: sqlite3.Connection, file: Path) -> None:
    """Raise if the file has anything but plain tables and indexes: views, triggers and columns that are computed would
    run as programs.
    """
    # Only tables and indexes have pages of their own; SQLite itself refuses a view that claims to.
    for kind, name in db.execute(
        "SELECT type, name FROM sqlite_master WHERE type NOT IN ('table', 'index') OR ifnull(rootpage, 0) <= 0"
        " UNION ALL SELECT 'computed column', column.name FROM sqlite_master AS known, pragma_table_xinfo(known.name)"
        " AS column WHERE known.type = 'table' AND column.hidden"
    ):
        raise RunError(f"{str(file)!r} is refused: it has {name!r:.80} ({kind}), and a run consists of plain tables")


def remove(file: Path) -> None:
    """Delete a database, and the files that SQLite puts next to it."""
    for suffix in ("", *BESIDE):
        file.with_name(file.name + suffix).unlink(missing_ok=True)


def _end(journal: Path) -> bytes:
    """The last bytes of a journal."""
    if not journal.exists():
        return b""
    with journal.open("rb") as opened:
        opened.seek(max(0, journal.stat().st_size - len(_JOURNAL)))
        return opened.read(len(_JOURNAL))


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    draft = file.with_name(f"{DRAFT}{os.getpid()}")
    try:
        yield draft
    finally:
        remove(draft)


def _draw(file: Path, journal: str) -> None:
    """Write the tables in one script: a statement that were still alive would keep the file open when it is renamed.

    The journal comes last, and is used once to see that it works. Tables in a write-ahead log would be lost with it if
    the disk were too full to move them into the file.
    """
    owner = json.dumps(this_process()).replace("'", "''")
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.executescript(f"""
            PRAGMA page_size = {_PAGE};
            BEGIN; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; {_TABLES}
            INSERT INTO life VALUES (0, 'running', {time.time()}, NULL, '{owner}'); COMMIT;
            PRAGMA journal_mode = {journal}; SELECT state FROM life;
        """)
