"""Results as tables: printed they fill at most a screen, and `table()` has every row."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torchhook.core.cards import boxed, text
from torchhook.core.text import html_table, table

_SCREEN = 24  # rows


class Tabular:
    """A result that is a table. A subclass says what its `_records` are, and how to print them if they are not short.

    >>> class Calls(Tabular):
    ...     def _title(self):
    ...         return "One call"
    ...
    ...     def _records(self):
    ...         return [{"path": "conv1", "share": 1 / 3}]
    >>> Calls()
    One call
    path    share
    conv1  0.3333
    >>> Calls().table("list")
    [{'path': 'conv1', 'share': 0.3333333333333333}]
    """

    def table(self, kind: str | None = None) -> Any:
        """All rows: a DataFrame if pandas is installed, else a list of dicts.

        `kind` chooses: ``"pandas"``, ``"polars"`` or ``"list"``.
        """
        return frame(self._records(), kind)

    def __repr__(self) -> str:
        header, rows = self._printed()
        shown = [table(header, self._window(rows))] if rows else []
        return "\n".join(filter(None, [self._title(), *shown, *_more(rows), *self._foot()]))

    def _repr_html_(self) -> str:
        header, rows = self._printed()
        title = f"<p>{text(self._title())}</p>" if self._title() else ""
        below = "".join(f"<p>{text(line)}</p>" for line in (*_more(rows), *self._foot()))
        shown = html_table(header, self._window(rows)) if rows else ""
        return boxed(f"{title}{self._picture()}{shown}{below}")

    def _records(self) -> list[dict[str, Any]]:
        """One dict per row."""
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def _printed(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Header and rows as they are printed."""
        records = self._records()
        header = list(dict.fromkeys(name for record in records for name in record))
        return header, [[short(record.get(name, "")) for name in header] for record in records]

    def _window(self, rows: Sequence[Any]) -> Sequence[Any]:
        """A screen of rows around the most important one."""
        start = max(0, min(self._important() - _SCREEN // 2, len(rows) - _SCREEN))
        return rows[start : start + _SCREEN]

    def _important(self) -> int:
        """The number of the row to show in any case."""
        return 0

    def _title(self) -> str:
        """The line above the table."""
        return ""

    def _foot(self) -> Sequence[str]:
        """The lines below it."""
        return ()

    def _picture(self) -> str:
        """What a notebook shows before the table, as HTML."""
        return ""


def frame(records: list[dict[str, Any]], kind: str | None = None) -> Any:
    """`records` as a DataFrame of pandas if it is installed, else as they are; `kind` chooses.

    >>> frame([{"path": "conv1", "calls": 1}], "list")
    [{'path': 'conv1', 'calls': 1}]
    """
    if kind is None:
        kind = "pandas" if find_spec("pandas") else "list"
    if kind == "list":
        return records
    if kind not in ("pandas", "polars"):
        raise ValueError(f"kind must be 'pandas', 'polars', 'list' or None, not {kind!r}")
    if not find_spec(kind):
        raise ImportError(f"table({kind!r}) needs {kind}: pip install {kind}")
    return import_module(kind).DataFrame(records)


def short(value: Any) -> Any:
    """A number as it is printed: four digits."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _more(rows: Sequence[Any]) -> list[str]:
    more = len(rows) - _SCREEN
    return [f"… and {more} more row{'s' * (more > 1)}: .table() has all"] if more > 0 else []
