"""A line in the terminal that says how far a long loop is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO, TypeVar

_T = TypeVar("_T")
_WIDE = 30  # characters of the bar


def shown(values: Iterable[_T], count: int | None, what: str, file: TextIO | None) -> Iterator[_T]:
    """`values` as they come, with a line that says how many of `count` there were; only in a terminal.

    Without `count`, which not everything that can be looped over knows, it says how many there were.

    >>> list(shown("ab", 2, "letters", None))
    ['a', 'b']
    """
    shows = file is not None and file.isatty()
    for number, value in enumerate(values, 1):
        if shows:
            print(f"\r{what} {bar(number, count)}", end="", file=file, flush=True)
        yield value
    if shows:
        print(file=file)


def bar(number: int, count: int | None) -> str:
    """How many of how many, with a bar before it.

    >>> bar(15, 30)
    '███████████████░░░░░░░░░░░░░░░ 15/30'
    """
    if not count:
        return f"{number:,}"
    done = min(_WIDE, _WIDE * number // count)
    return f"{'█' * done}{'░' * (_WIDE - done)} {number:,}/{count:,}"
