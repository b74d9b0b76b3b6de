"""Progress of long work: a bar drawn by rich in a terminal, a function of the user's own, or nothing.

``TORCHHOOK_PROGRESS=0`` turns off the bars, and the lines of `announce`.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Protocol, TextIO, TypeVar

from torchhook.core.text import user_level

_T = TypeVar("_T")

Progress = bool | Callable[[str, int, int | None], None]
"""True for a bar if stderr is a terminal, False for nothing, or a function (what, done, total)."""


class Tell(Protocol):
    """Reports progress: what is being done, how much of the total is done, and a note behind the bar."""

    def __call__(self, what: str, done: int, total: int | None, note: str = "") -> None:
        """Report."""


@contextmanager
def progress_bar(first: str, progress: Progress) -> Iterator[Tell | None]:
    """What reports progress while the block runs, or None if it need not be; `first` is the first label of a bar.

    >>> with progress_bar("loading", False) as tell:
    ...     print(tell)
    None
    """
    if callable(progress):
        yield lambda what, done, total, note="": progress(what, done, total)
        return
    with _drawn(first, _file(progress)) as tell:
        yield tell


def track(values: Iterable[_T], total: int | None, what: str, progress: Progress) -> Iterator[_T]:
    """`values` one by one, reporting how many of `total` are done.

    >>> list(track("ab", 2, "letters", print))
    letters 1 2
    letters 2 2
    ['a', 'b']
    """
    with progress_bar(what, progress) as tell:
        for number, value in enumerate(values, 1):
            yield value
            if tell is not None:
                tell(what, number, total)


def announce(line: str) -> None:
    """Print one line on stderr about work that no argument asked for. Where stderr is closed, nothing is said."""
    if _is_wanted():
        with suppress(Exception):
            sys.stderr.write(f"torchhook: {line}\n")
            sys.stderr.flush()


@contextmanager
def _drawn(first: str, file: TextIO | None) -> Iterator[Tell | None]:
    """A bar in `file`, or None if it is not a terminal or rich is not installed."""
    if file is None or file.closed or not file.isatty() or find_spec("rich") is None:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=file)
    if console.is_dumb_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    note_column = TextColumn("{task.fields[note]}")
    with Progress(*columns, note_column, console=console, transient=True) as progress:
        task = progress.add_task(first, total=None, note="")

        def tell(what: str, done: int, total: int | None, note: str = "") -> None:
            progress.update(task, description=what, completed=done, total=total, note=note)

        yield tell


def _file(progress: object) -> TextIO | None:
    """Where to draw the bar; before `progress` was a bool, it was that file, or None."""
    if isinstance(progress, bool):
        return sys.stderr if progress and _is_wanted() else None
    if progress is not None and not isinstance(progress, io.TextIOBase) and not hasattr(progress, "isatty"):
        raise TypeError(f"progress must be True, False or a function (what, done, total), not {progress!r:.80}")
    message = "progress takes True, False or a function (what, done, total); files and None will go in the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=user_level())
    return progress  # type: ignore[return-value]  # by its isatty


def _is_wanted() -> bool:
    return os.environ.get("TORCHHOOK_PROGRESS") != "0"
