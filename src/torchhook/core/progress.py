"""Progress of long work: a bar drawn by rich in a terminal, and nothing elsewhere or without rich."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Protocol, TextIO, TypeVar

_T = TypeVar("_T")


class Tell(Protocol):
    """Reports progress: what is being done, how much of the total is done, and a note behind the bar."""

    def __call__(self, what: str, done: int, total: int | None, note: str = "") -> None:
        """Report."""


@contextmanager
def progress_bar(first: str, file: TextIO | None) -> Iterator[Tell | None]:
    """A bar in `file` while the block runs, or None if `file` is not a terminal; `first` is its first label.

    >>> with progress_bar("loading", None) as tell:
    ...     print(tell)
    None
    """
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


def track(values: Iterable[_T], total: int | None, what: str, file: TextIO | None) -> Iterator[_T]:
    """`values` one by one, with a bar in `file` that shows how many of `total` are done.

    >>> list(track("ab", 2, "letters", None))
    ['a', 'b']
    """
    with progress_bar(what, file) as tell:
        for number, value in enumerate(values, 1):
            yield value
            if tell is not None:
                tell(what, number, total)
