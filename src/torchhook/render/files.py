"""Results in files. Writing is atomic: a reader sees the old file or the new one, never part of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchhook.core.errors import FileError
from torchhook.core.findings import Report
from torchhook.core.result import SUFFIX, Result, Saved, read, replace_file
from torchhook.render.to_html import html
from torchhook.render.to_json import from_json, json
from torchhook.render.to_junit import junit
from torchhook.render.to_markdown import markdown

FORMATS: dict[str, Callable[[Any], str]] = {".html": html, ".json": json, ".md": markdown, ".xml": junit}


def save(result: Report | Result, path: str | os.PathLike[str]) -> None:
    """Write a result to a file, in the format of its suffix.

    Any result can be written as ``.th``, which the dashboard opens and `load` reads back, and as ``.html``. A report
    can also be written as ``.json``, ``.md`` or ``.xml`` (JUnit).

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> save(Report(model="Net"), Path(folder.name, "report.json"))
    >>> load(Path(folder.name, "report.json"))
    Net: nothing found
    """
    path = Path(path)
    suffix = path.suffix.lower()
    formats = FORMATS if isinstance(result, Report) else {".html": html}
    if suffix == SUFFIX:
        result.save(path)
    elif suffix in formats:
        replace_file(path, formats[suffix](result).encode("utf-8", errors="replace"))
    else:
        what = "report" if isinstance(result, Report) else "result"
        known = ", ".join([*formats, SUFFIX])
        raise ValueError(f"cannot save a {what} as {path.name!r}: the suffix must be one of {known}")


def load(path: str | os.PathLike[str]) -> Report | Saved:
    """Read the result in a ``.th`` file, or the report in a ``.json`` file. Reading never executes code.

    What is not a report comes back as a `Saved`, which prints and shows what the original did, and has its ``table()``.

    >>> load("report.html")
    Traceback (most recent call last):
    ValueError: cannot read a result from 'report.html': only .th and .json can be read back
    """
    path = Path(path)
    if path.suffix.lower() == SUFFIX:
        return read(path)
    if path.suffix.lower() != ".json":
        raise ValueError(f"cannot read a result from {path.name!r}: only .th and .json can be read back")
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise FileError(f"{str(path)!r} is not a report of torchhook, or it is corrupt: {error}") from error
