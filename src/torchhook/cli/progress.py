"""A bar on the terminal while something takes long; nothing where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(first: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """What to tell of the progress, or None if nobody looks; `first` is what is done before anything is told."""
    console = Console(stderr=True)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(first, total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
