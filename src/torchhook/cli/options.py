"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchhook.cli.outputs import Format
from torchhook.core.findings import Severity

RULES, OUTPUT = "What to look for", "What to write"


def _severity(text: str) -> Severity:
    if text not in list(Severity):
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(Severity)}")
    return Severity(text)


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="package.module:name of a model, or of a function or class that creates one."),
]
Select = Annotated[
    list[str] | None,
    typer.Option(
        "--select",
        "--rules",
        metavar="CODES",
        rich_help_panel=RULES,
        help="Apply only these rules: TH201, or TH2,TH4 for families.",
    ),
]
Ignore = Annotated[
    list[str] | None, typer.Option("--ignore", metavar="CODES", rich_help_panel=RULES, help="Do not apply these rules.")
]
FailOn = Annotated[
    Severity | None,
    typer.Option(
        "--fail-on",
        parser=_severity,
        metavar="SEVERITY",
        rich_help_panel=RULES,
        help="Exit with code 1 from this severity on: info, warning or error (default).",
    ),
]
Reports = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        rich_help_panel=OUTPUT,
        help="Write a report: .html, .json, .xml (JUnit) or .md. May be repeated.",
    ),
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", rich_help_panel=OUTPUT, help="Also say which rules were skipped, and why."),
]
Form = Annotated[
    Format,
    typer.Option(
        "--format", metavar="FORMAT", rich_help_panel=OUTPUT, help="What to print: text, json, junit or markdown."
    ),
]
