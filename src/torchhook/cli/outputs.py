"""Where a report goes: standard output, files, and the summary of a CI job."""

from __future__ import annotations

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import typer

from torchhook import render
from torchhook.cli.loaders import wrong
from torchhook.core.findings import Report
from torchhook.core.optional import require
from torchhook.render.files import FORMATS


class Format(str, Enum):
    """The format to print a report in."""

    TEXT = "text"
    JSON = "json"
    JUNIT = "junit"
    MARKDOWN = "markdown"


def require_writable(paths: Iterable[Path]) -> None:
    """Refuse files that a report cannot be written to, before any work is done."""
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            raise wrong("--report", f"{path.name!r} must end in {', '.join(FORMATS)}")
        if not path.parent.is_dir():
            raise wrong("--report", f"there is no folder {str(path.parent)!r}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise wrong("--report", f"{str(path)!r} cannot be written")
        if path.suffix.lower() == ".html":
            require("plotly.offline", "plot", "an HTML report")


def deliver(report: Report, form: Format, paths: Iterable[Path], verbose: bool = False) -> None:
    """Write the files, print the report, and in a GitHub job add it to the summary."""
    paths = list(paths)
    for path in paths:
        render.save(report, path)
    if form == Format.TEXT:
        render.terminal(report, verbose=verbose)
        for path in paths:
            typer.echo(f"written: {path}")
    else:
        typer.echo(_printed(report, form, verbose).encode(errors="replace"), nl=False)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8", errors="replace") as file:
            file.write(render.markdown(report, verbose=verbose) + "\n")


def _printed(report: Report, form: Format, verbose: bool) -> str:
    if form == Format.MARKDOWN:
        return render.markdown(report, verbose=verbose)
    return render.json(report) if form == Format.JSON else render.junit(report)
