"""Reports in files: the suffix says the format, and a reader finds the old file or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from torchhook.core.findings import Report
from torchhook.render.to_html import html
from torchhook.render.to_json import from_json, json
from torchhook.render.to_junit import junit
from torchhook.render.to_markdown import markdown

FORMATS: dict[str, Callable[[Report], str]] = {".html": html, ".json": json, ".md": markdown, ".xml": junit}


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write a report to a file: ``.html`` is for people, ``.json`` for programs, ``.xml`` (JUnit) and ``.md`` for CI.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> save(Report(model="Net"), Path(folder.name, "report.json"))
    >>> load(Path(folder.name, "report.json"))
    Net: nothing found
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"a report is saved as {', '.join(FORMATS)}, not as {path.name!r}")
    text = FORMATS[path.suffix.lower()](report)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text)


def load(path: str | os.PathLike[str]) -> Report:
    """The report in a ``.json`` file.

    >>> load("report.html")
    Traceback (most recent call last):
    ValueError: a report is read from .json, not from 'report.html'
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        raise ValueError(f"a report is read from .json, not from {path.name!r}")
    return from_json(path.read_text(encoding="utf-8"))


def _replace(path: Path, text: str) -> None:
    """Write beside the file, then rename: the file is whole at every moment."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode("utf-8", errors="replace"))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
