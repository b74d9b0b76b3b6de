"""The runs that the dashboard shows: those in a folder, or a single one; beside them are saved results."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.core.result import SUFFIX
from torchhook.dashboard.catalog import Catalog, stat_of
from torchhook.dashboard.sheets import Book
from torchhook.training.runs.folders import WHERE
from torchhook.training.runs.location import located
from torchhook.training.runs.schema import FILE

OPEN = 12  # books at a time: three files each while the run is written, so that a process stays below 64


class Library:
    """Runs by name, each opened when it is first needed, and closed when others were needed since.

    >>> import tempfile
    >>> from torchhook.training.runs import RunLog
    >>> root = Path(tempfile.mkdtemp())
    >>> RunLog(root / "first").begin({"model": "Net"})
    >>> library = Library(root)
    >>> list(library.files()), library.book("first").run.model
    (['first'], 'Net')
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path).resolve()
        self.only_result = path.name if path.is_file() and path.suffix == SUFFIX else None
        if self.only_result is not None:
            path = path.parent
        self.only = located(path).parent if path.is_file() or (path / FILE).is_file() else None
        self.root = path if self.only is None else self.only.parent
        self._books: OrderedDict[str, Book] = OrderedDict()  # the one that was needed last is at the end
        self._opening = threading.Lock()
        self.catalog = Catalog(self.root, self.files)
        self.files()  # raises now if something is wrong with the folder

    def files(self) -> dict[str, os.stat_result]:
        """The file of each run, as it is now, newest first. Links to runs elsewhere are left out."""
        try:
            found = {name: file for name, path in self._folders() if (file := stat_of(f"{path}/{FILE}")) is not None}
        except OSError as error:
            raise RunError(f"cannot list the folder {str(self.root)!r} ({error.strerror}); {WHERE}") from None
        return dict(sorted(found.items(), key=lambda pair: (pair[1].st_mtime_ns, pair[0]), reverse=True))

    def _folders(self) -> list[tuple[str, str]]:
        if self.only_result is not None:
            return []
        if self.only is not None:
            return [(self.only.name, str(self.only))]
        with os.scandir(self.root) as entries:
            return [(entry.name, entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]

    def book(self, name: str) -> Book:
        """The book of a run. Only the name of a folder in this one is accepted, so it cannot lead elsewhere."""
        with self._opening:
            book = self._books.pop(name, None)
            if book is not None and not book.is_there():  # deleted or replaced
                book.run.close()
                book = None
            if book is None:
                if name not in self.files():
                    raise RunError(f"there is no run {name!r} in {str(self.root)!r}")
                book = Book(self.root / name)
            self._books[name] = book
            while len(self._books) > OPEN:
                self._books.popitem(last=False)[1].run.close()
            return book
