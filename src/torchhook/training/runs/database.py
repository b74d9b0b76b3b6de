"""A run that is open for writing. Errors are raised here; `RunLog` catches them, so that no training fails."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torchhook.core.errors import RunError
from torchhook.core.findings import Finding, Report
from torchhook.render.to_json import json as report_json
from torchhook.rules.entry import Entry
from torchhook.stats.downsample import measured_at, thinned
from torchhook.stats.reading import Place, Row
from torchhook.training.runs.groups import Group, settings_of, text
from torchhook.training.runs.owners import this_process
from torchhook.training.runs.ranks import as_columns
from torchhook.training.runs.schema import (
    APPLICATION,
    RANKS,
    VERSION,
    can_log_ahead,
    create,
    require_own_files,
    require_tables,
)

_PATIENCE = 1.0  # seconds to wait for other writers and readers
_AT_ONCE = 50  # steps that are deleted in one transaction, so that its log stays small


class Known(NamedTuple):
    """A place that is already in the tables."""

    id: int
    stats: dict[str, Any]
    failed: dict[str, str]


class Database:
    """The tables of one run, created if need be; `log_bytes` is the size limit of SQLite's write-ahead log."""

    def __init__(self, file: Path, log_bytes: int) -> None:
        self.file = file
        self.log_bytes = log_bytes
        require_own_files(file)  # a run that is continued may be that of a stranger
        if not file.exists():
            create(file)
        self._db = sqlite3.connect(file, timeout=_PATIENCE, isolation_level=None, check_same_thread=False)
        try:
            self._prepare()
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA trusted_schema = OFF")
        version = self._number("PRAGMA user_version")
        if self._number("PRAGMA application_id") != APPLICATION or version > VERSION:
            raise RunError(f"cannot write to {str(self.file)!r}: another program or a newer torchhook wrote it")
        require_tables(self._db, self.file)
        self._db.execute(RANKS)
        pages = self.log_bytes // (2 * self._number("PRAGMA page_size"))
        if self._db.execute("PRAGMA journal_mode").fetchone() != ("wal",):  # it had ended, or there cannot be one
            # A persistent journal shows readers that the run is being written.
            self._db.execute(f"PRAGMA journal_mode = {'WAL' if can_log_ahead(self.file) else 'PERSIST'}")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(f"PRAGMA wal_autocheckpoint = {max(1, min(1000, pages))}")
        self._db.execute(f"PRAGMA journal_size_limit = {self.log_bytes}")
        self._db.execute("PRAGMA secure_delete = OFF")  # some systems overwrite what is deleted with zeros
        self._places = {
            (path, port): Known(id_, json.loads(stats), json.loads(failed))
            for id_, path, port, stats, failed in self._db.execute("SELECT id, path, port, stats, failed FROM places")
        }
        self._read_layouts()
        self._losses = self._number("SELECT count(*) FROM losses")

    def begin(self, about: Mapping[str, Any]) -> None:
        """Mark the run as written by this process from now on."""
        self.tell(about)
        with self._transaction() as db:
            db.execute("UPDATE life SET state = 'running', ended = NULL, owner = ?", (_json(this_process()),))

    def tell(self, about: Mapping[str, Any]) -> None:
        """Add facts about the whole run."""
        with self._transaction() as db:
            rows = [(text(str(key)), _json(value)) for key, value in about.items()]
            db.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def add(self, entry: Entry, groups: Iterable[tuple[Group, bytes]]) -> None:
        """Write a measured step: its groups of states, with the blob of each."""
        with self._transaction() as db:
            if entry.snapshot:  # else there are losses alone
                db.execute("DELETE FROM states WHERE step = ?", (entry.step,))
                db.execute("INSERT OR REPLACE INTO windows VALUES (?, ?, ?)", (entry.step, entry.time, entry.rate))
            db.executemany("INSERT OR REPLACE INTO losses VALUES (?, ?)", entry.losses.items())
            for place, row in entry.snapshot.rows.items():
                self._know(place, row)
            rows = [(entry.step, self._layout(group), blob) for group, blob in groups]
            db.executemany("INSERT INTO states VALUES (?, ?, ?)", rows)
            if entry.ranks is not None:
                columns = as_columns(entry.ranks, {place: known.id for place, known in self._places.items()})
                db.execute("INSERT OR REPLACE INTO ranks VALUES (?, ?, ?, ?)", columns)
        self._losses += len(entry.losses)

    def add_sample(self, step: int, path: str, file: Path, low: float, high: float) -> None:
        """Add a picture that is stored next to the tables."""
        with self._transaction() as db:
            row = step, text(path), file.name, file.stat().st_size, low, high
            db.execute("INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?)", row)

    def find(self, finding: Finding, seen: int) -> None:
        """Add a finding that was made when the run was at step `seen`."""
        with self._transaction() as db:
            row = text(finding.code), text(finding.site), finding.step, seen, _as_text(Report((finding,)))
            db.execute("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?)", row)

    def keep(self, report: Report, step: int) -> None:
        """Replace the report; its losses are in a table already."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO report VALUES (0, ?, ?)", (step, _as_text(replace(report, losses={}))))

    def end(self, state: str) -> None:
        """Mark the run as over. One plain file remains, unless there are readers."""
        with self._transaction() as db:
            db.execute("UPDATE life SET state = ?, ended = ?", (state, time.time()))
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._db.execute("PRAGMA busy_timeout = 0")
        with suppress(sqlite3.OperationalError):  # a reader still needs the write-ahead log
            self._db.execute("PRAGMA journal_mode = DELETE")
        self.close()

    def thin(self, most_bytes: int, most_losses: int) -> None:
        """Delete some of the older steps if the tables are too large."""
        if self._losses > most_losses:
            steps = self._steps("losses")
            gone = thinned(steps) if len(steps) > most_losses else []
            self._delete(gone, "losses")
            self._losses = len(steps) - len(gone)
        if self._used() > most_bytes:
            while self._used() > 0.9 * most_bytes and self._thin_windows():
                pass
            with self._transaction() as db:
                db.execute("DELETE FROM layouts WHERE id NOT IN (SELECT layout FROM states)")
            self._read_layouts()
        self._shorten_log()

    def thin_samples(self, most_bytes: int, most_files: int) -> list[str]:
        """The same for pictures; returns the names of the files to delete."""
        sizes = self._db.execute("SELECT step, count(*), sum(size) FROM samples GROUP BY step ORDER BY step").fetchall()
        gone: list[int] = []
        while sizes and (sum(size for _, _, size in sizes) > most_bytes or sum(n for _, n, _ in sizes) > most_files):
            steps = [step for step, _, _ in sizes]
            some = thinned(steps) or steps[:1]
            gone += some
            sizes = [row for row in sizes if row[0] not in some]
        files = [
            str(file)
            for step in gone
            for (file,) in self._db.execute("SELECT file FROM samples WHERE step = ?", (step,))
        ]
        if gone:
            self._delete(gone, "samples")
        return files

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def _thin_windows(self) -> bool:
        """Delete some of the older steps; whether there were any to delete."""
        steps = self._steps("windows")
        named = [step for (step,) in self._db.execute("SELECT step FROM findings WHERE step IS NOT NULL")]
        gone = thinned(steps, measured_at(steps, named)) or thinned(steps)
        self._delete(gone, "windows", "states", "ranks")
        return bool(gone)

    def _delete(self, steps: Sequence[int], *tables: str) -> None:
        remaining = iter(steps)
        while some := [(step,) for step in islice(remaining, _AT_ONCE)]:
            with self._transaction() as db:
                for table in tables:
                    db.executemany(f"DELETE FROM {table} WHERE step = ?", some)

    def _shorten_log(self) -> None:
        """Wait for readers once if the write-ahead log is too long; constant readers would let it grow."""
        log = self.file.with_name(f"{self.file.name}-wal")
        if log.exists() and log.stat().st_size > self.log_bytes:
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def _know(self, place: Place, row: Row) -> None:
        """Write what is new about a place."""
        known = self._places.get(place)
        if known and all(stat.name in known.stats for stat in row.stats) and row.failed.keys() <= known.failed.keys():
            return
        path, port = map(text, place)
        known = known or self._places.get((path, port), Known(0, {}, {}))
        stats = {**known.stats, **{stat.name: settings_of(stat) for stat in row.stats}}
        failed = {**known.failed, **row.failed}
        added = self._db.execute(
            "INSERT INTO places (path, port, label, note, stats, failed) VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (path, port) DO UPDATE SET stats = excluded.stats, failed = excluded.failed",
            (path, port, text(row.label), text(row.note), _json(stats), _json(failed)),
        )
        self._places[place] = Known(known.id or int(added.lastrowid or 0), stats, failed)

    def _layout(self, group: Group) -> int:
        ids = [self._places[place].id for place in group.places]
        shape = group.states.shape[2:]
        key = text(group.stat), text(group.port), json.dumps(shape), json.dumps(ids)
        if key not in self._layouts:
            added = self._db.execute("INSERT INTO layouts (stat, port, shape, places) VALUES (?, ?, ?, ?)", key)
            self._layouts[key] = int(added.lastrowid or 0)
        return self._layouts[key]

    def _read_layouts(self) -> None:
        rows = self._db.execute("SELECT id, stat, port, shape, places FROM layouts")
        self._layouts: dict[tuple[str, ...], int] = {tuple(key): id_ for id_, *key in rows}

    def _used(self) -> int:
        """Bytes of the pages in use; free pages are reused."""
        pages = self._number("PRAGMA page_count") - self._number("PRAGMA freelist_count")
        return pages * self._number("PRAGMA page_size")

    def _steps(self, table: str) -> list[int]:
        return [step for (step,) in self._db.execute(f"SELECT step FROM {table} ORDER BY step")]

    def _number(self, query: str) -> int:
        (number,) = self._db.execute(query).fetchone()
        return int(number)

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise


def _json(value: Any) -> str:
    """A value as JSON, or its repr where JSON cannot express it."""
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(repr(value))


def _as_text(report: Report) -> str:
    return text(report_json(report))
