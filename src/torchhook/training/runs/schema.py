"""The tables of a run, and how the file comes to be: whole, or not at all."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from torchhook.training.runs.owners import this_process

FILE = "run.sqlite"
SAMPLES = "samples"
APPLICATION = 0x74687275  # in the header of the file, for it to be known by: "thru"
VERSION = 1  # beside it; it grows when a reader of the old ones would fail
_PAGE = 8192  # bytes: the blobs of most models leave little room unused in these

BESIDE = ("-wal", "-shm", "-journal")
"""How the names of the files go on that SQLite puts beside the one."""

_TABLES = """
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
CREATE TABLE layouts (  -- what a blob holds: states of which statistic, at which port, of which shape and places
    id INTEGER PRIMARY KEY, stat TEXT, port TEXT, shape TEXT, places TEXT, UNIQUE (stat, port, shape, places)
);
CREATE TABLE states (step INTEGER, layout INTEGER, data BLOB, PRIMARY KEY (step, layout));
CREATE TABLE findings (code TEXT, site TEXT, step INTEGER, seen INTEGER, data TEXT, UNIQUE (code, site));
CREATE TABLE samples (step INTEGER, path TEXT, file TEXT PRIMARY KEY, size INTEGER, low REAL, high REAL);
CREATE TABLE report (id INTEGER PRIMARY KEY CHECK (id = 0), step INTEGER, data TEXT);
"""


def create(file: Path) -> None:
    """Make a run in which nothing is yet but who writes it.

    It is made under another name and renamed: whoever finds the file finds a run, also after a crash. Where there can
    be no write-ahead log, as on some network disks, there is none.
    """
    with _draft(file) as draft:
        try:
            _draw(draft, "wal")
        except sqlite3.OperationalError:
            remove(draft)
            _draw(draft, "delete")
        draft.replace(file)


def can_log_ahead(file: Path) -> bool:
    """Whether a database beside `file` can have a write-ahead log; to find out with `file` itself may break it."""
    with _draft(file) as draft:
        try:
            _draw(draft, "wal")
        except sqlite3.OperationalError:
            return False
        return True


def remove(file: Path) -> None:
    """Delete a database, and what SQLite puts beside it."""
    for suffix in ("", *BESIDE):
        file.with_name(file.name + suffix).unlink(missing_ok=True)


@contextmanager
def _draft(file: Path) -> Iterator[Path]:
    draft = file.with_name(f".{FILE}.{os.getpid()}")
    try:
        yield draft
    finally:
        remove(draft)


def _draw(file: Path, journal: str) -> None:
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute(f"PRAGMA page_size = {_PAGE}")
        db.execute(f"PRAGMA journal_mode = {journal}")
        db.executescript(f"BEGIN; PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; {_TABLES}")
        db.execute("INSERT INTO life VALUES (0, 'running', ?, NULL, ?)", (time.time(), json.dumps(this_process())))
        db.execute("COMMIT")
