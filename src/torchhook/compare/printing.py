"""How much of a result is printed."""

from __future__ import annotations

SHOWN = 20
"""Rows of a table in a terminal or a notebook."""


def rest_of(count: int, shown: int = SHOWN, where: str = ".table()") -> str:
    """What to say below a table that does not show all of its `count` rows.

    >>> rest_of(23), rest_of(20)
    ('\\n… and 3 more: see .table()', '')
    """
    return f"\n… and {count - shown} more: see {where}" if count > shown else ""
