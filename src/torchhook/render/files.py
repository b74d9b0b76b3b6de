"""Reports in files. Writing is atomic: a reader sees the old file or the new one, never part of one."""

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
    """Write a report to a file, in the format of its suffix: ``.html``, ``.json``, ``.md`` or ``.xml`` (JUnit).

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> save(Report(model="Net"), Path(folder.name, "report.json"))
    >>> load(Path(folder.name, "report.json"))
    Net: nothing found
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot save a report as {path.name!r}: the suffix must be one of {', '.join(FORMATS)}")
    text = FORMATS[path.suffix.lower()](report)
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, text)


def load(path: str | os.PathLike[str]) -> Report:
    """Read the report in a ``.json`` file.

    >>> load("report.html")
    Traceback (most recent call last):
    ValueError: cannot read a report from 'report.html': only .json can be read back
    """
    path = Path(path)
    if path.suffix.lower() != ".json":
        raise ValueError(f"cannot read a report from {path.name!r}: only .json can be read back")
    return from_json(path.read_text(encoding="utf-8"))


def _replace(path: Path, text: str) -> None:
    """Write to a temporary file beside it, then rename."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(text.encode("utf-8", errors="replace"))
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
