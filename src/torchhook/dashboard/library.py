"""The runs that the dashboard shows: those in a folder, or a single one."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.dashboard.sheets import Book
from torchhook.training.runs.folders import find
from torchhook.training.runs.location import located
from torchhook.training.runs.schema import FILE


class Library:
    """Runs by name, each opened when it is first needed.

    >>> import tempfile
    >>> from torchhook.training.runs import RunLog
    >>> root = Path(tempfile.mkdtemp())
    >>> RunLog(root / "first").begin({"model": "Net"})
    >>> library = Library(root)
    >>> library.names(), library.book("first").run.model
    (['first'], 'Net')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path).resolve()
        self.only = located(path).parent if path.is_file() or (path / FILE).is_file() else None
        self.root = path if self.only is None else self.only.parent
        self._books: dict[str, Book] = {}
        self._opening = threading.Lock()
        self.names()  # raises now if something is wrong with the folder

    def names(self) -> list[str]:
        """The names of all runs, newest first."""
        return [self.only.name] if self.only is not None else [folder.name for folder in find(self.root)]

    def book(self, name: str) -> Book:
        """The book of a run; only names of `names` are accepted, so a name cannot lead to another folder."""
        with self._opening:
            book = self._books.get(name)
            if book is not None and not book.is_there():  # deleted or replaced
                self._books.pop(name).run.close()
                book = None
            if book is None:
                if name not in self.names():
                    raise RunError(f"there is no run {name!r} in {str(self.root)!r}")
                book = self._books[name] = Book(self.root / name)
            return book
