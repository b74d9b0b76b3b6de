"""Rows of a run's tables. SQLite stores any type in any column, so each row is checked before it is used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

WHOLE = (int,)
NUMBER = (int, float)
TEXT = (str,)
BYTES = (bytes,)
MAYBE_WHOLE = (int, type(None))
MAYBE_NUMBER = (int, float, type(None))  # SQLite stores NaN as NULL

_LAST = 253_402_300_799.0  # the last second of the year 9999, which is as far as calendars go


def rows(
    db: sqlite3.Connection, query: str, kinds: Sequence[tuple[type, ...]], values: Sequence[Any] = ()
) -> Iterator[Any]:
    """The rows of a query, whose columns must have these kinds.

    >>> db = sqlite3.connect(":memory:")
    >>> list(rows(db, "SELECT 1, 'fc'", (WHOLE, TEXT)))
    [(1, 'fc')]
    >>> list(rows(db, "SELECT NULL", (TEXT,)))
    Traceback (most recent call last):
    ValueError: SELECT NULL returned (None,)
    """
    for row in db.execute(query, values):
        if not all(map(isinstance, row, kinds)):
            raise ValueError(f"{query:.80} returned {row!r:.80}")
        yield row


def moment(seconds: float) -> float:
    """A time in seconds since 1970, if a calendar has it.

    >>> moment(1e300)
    Traceback (most recent call last):
    ValueError: 1e+300 is not a time
    """
    if not 0 <= seconds <= _LAST:
        raise ValueError(f"{seconds!r} is not a time")
    return float(seconds)
