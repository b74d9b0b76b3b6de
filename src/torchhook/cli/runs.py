"""``torchhook runs``: list, show, export and prune runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchhook.cli.loaders import wrong
from torchhook.cli.options import Form, Reports, Verbose
from torchhook.cli.outputs import Format, deliver, require_writable

if TYPE_CHECKING:
    from torchhook.training.runs import Run
    from torchhook.training.runs.summary import Summary

app = typer.Typer(no_args_is_help=True, help="List, show, export and prune the runs that trainings wrote.")

_Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that holds the runs.")]
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run; runs/latest is the last one.")]


@app.command("list")
def list_(folder: _Folder = Path("runs")) -> None:
    """List the runs in a folder, newest first. One that cannot be read says why.

    [bold]torchhook runs list[/]
    """
    from torchhook.training.runs.folders import leftovers, summaries
    from torchhook.training.runs.schema import UNWRITTEN

    left = [file.relative_to(folder) for file in leftovers(folder) if file.name != UNWRITTEN]
    rows = [*map(_line, summaries(folder)), *map(_left, left)]
    if not rows:
        typer.echo(f"There are no runs in {folder}.")
        return
    _print(["run", "model", "state", "started", "last step", "findings", "size", ""], rows)


@app.command()
def show(
    run: _Run,
    reports: Reports = None,
    form: Form = Format.TEXT,
    verbose: Verbose = False,
) -> None:
    """Show what was found in a run. The exit code is 1 if the report fails.

    [bold]torchhook runs show runs/latest[/]
    [bold]torchhook runs show runs/latest --report report.html[/]
    """
    from torchhook.training.runs import Run

    require_writable(reports or ())
    with Run(run) as opened:
        report = opened.judged()
        if form == Format.TEXT:
            typer.echo(_summary(opened))
    deliver(report, form, reports or (), verbose)
    raise typer.Exit(report.exit_code)


@app.command()
def export(
    run: _Run,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="The Parquet file to write.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="The CSV file to write; - is standard output.")
    ] = None,
) -> None:
    """Write a run to a table with one row per measured step and site.

    [bold]torchhook runs export runs/latest --parquet run.parquet[/]
    [bold]torchhook runs export runs/latest --csv run.csv[/]
    """
    from torchhook.core.errors import RunError
    from torchhook.training.runs import Run
    from torchhook.training.runs.export import export_csv, export_parquet

    wanted = {option: file for option, file in (("--parquet", parquet), ("--csv", csv)) if file is not None}
    if not wanted:
        raise wrong("--parquet / --csv", "say which file to write")
    for option, file in wanted.items():
        if not file.parent.is_dir():
            raise wrong(option, f"there is no folder {str(file.parent)!r}")
    with Run(run) as opened:
        for option, file in wanted.items():
            try:
                rows = (export_csv if option == "--csv" else export_parquet)(opened, file)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise RunError(f"cannot write {file}: {error.strerror or error}") from None
            is_piped = str(file) == "-"
            typer.echo(
                f"written: {rows:,} rows to standard output" if is_piped else f"written: {file}, {rows:,} rows",
                err=is_piped,
            )


@app.command()
def prune(
    folder: _Folder = Path("runs"),
    keep: Annotated[int | None, typer.Option(metavar="N", min=0, help="Keep the newest N runs.")] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Remove only runs that are older than this.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it, only say which.")] = False,
) -> None:
    """Remove old runs, but none that is being written, and what is left of starts that failed.

    Other files in their folders are left in place.

    [bold]torchhook runs prune --keep 10[/]
    [bold]torchhook runs prune --older-than 30 --yes[/]
    """
    from torchhook.training.runs.folders import clear, delete, leftovers, prunable

    if keep is None and older_than is None:
        raise wrong("--keep", "say which runs to keep: --keep N, --older-than DAYS, or both")
    gone = prunable(folder, keep, older_than)
    for found in gone:
        if not yes:
            typer.echo(f"would remove: {_printable(found)}")
        elif delete(found):
            typer.echo(f"removed: {_printable(found)}")
        else:
            typer.echo(f"removed, except for files that do not belong to the run: {_printable(found)}")
    left = leftovers(folder)
    for file in left:
        if yes:
            clear(file)
        typer.echo(f"{'removed' if yes else 'would remove'}: {_printable(file)}")
    if not gone and not left:
        typer.echo("There is nothing to remove.")
    elif not yes:
        typer.echo("Nothing was removed yet: add --yes.")


def _line(run: Summary) -> list[str | int]:
    from torchhook.core.text import in_units

    last = "" if run.last_step is None else run.last_step
    findings, size = ("", "") if run.error else (run.findings, in_units(run.size))
    return [run.name, run.model, run.state, _date(run.started), last, findings, size, run.error]


def _left(file: Path) -> list[str | int]:
    return [
        str(file),
        "",
        "never began",
        "",
        "",
        "",
        "",
        "left by a start that failed; torchhook runs prune removes it",
    ]


def _summary(run: Run) -> str:
    from torchhook.core.text import in_units, table

    steps, losses, last = run.steps, run.losses, run.last_step
    facts = {
        "run": str(run.folder),
        "state": run.state,
        "started": _date(run.started),
        "ended": _date(run.ended),
        "steps": "" if last is None else f"{min([*steps, *losses])} to {last}, {len(steps):,} of them measured",
        "loss": f"{next(iter(losses.values())):.4g} to {next(reversed(losses.values())):.4g}" if losses else "",
        "samples": str(len(run.samples) or ""),
        "ranks": str(run.rank_step(run.rank_steps[-1]).world) if run.rank_steps else "",
        "size": in_units(run.size),
    }
    lines = table(["", ""], [[name, _printable(fact)] for name, fact in facts.items() if fact])
    return f"{lines.strip()}\n"


def _print(header: Sequence[str], rows: Sequence[Sequence[str | int]]) -> None:
    """A table on a terminal; elsewhere one line per run."""
    rows = [[_printable(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    console = Console(highlight=False)
    if not console.is_terminal:
        from torchhook.core.text import table

        typer.echo(table(header, rows))
        return
    shown = Table(*header, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        shown.add_row(*(Text(str(cell)) for cell in row))
    console.print(shown)


def _printable(name: object) -> str:
    """A name that fits on one line, without control characters."""
    from torchhook.render.words import short

    return " ".join(short(str(name), 200).split())


def _date(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
