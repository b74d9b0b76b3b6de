"""``torchhook why``: what is wrong with a run, and what to try next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchhook.cli.options import OUTPUT, FailOn
from torchhook.core.config import Config


def why(
    path: Annotated[
        Path, typer.Argument(metavar="RUN | FOLDER", help="A run, or a folder of runs: the newest readable one.")
    ] = Path("runs"),
    fail_on: FailOn = None,
    is_json: Annotated[
        bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print JSON, for programs; its schema has a version.")
    ] = False,
) -> None:
    """Say what is wrong with a run, on what evidence, and what to try next.

    The cause, the module with its class and the line that calls it, the step,
    what was tried, what the finding explains, and the next experiment.
    A healthy run says what was looked at. The run is read, never executed.

    [bold]torchhook why
    torchhook why runs/latest --json[/]
    """
    from torchhook.render.to_json import as_json
    from torchhook.render.words import short
    from torchhook.training.runs import Run
    from torchhook.training.runs.folders import latest

    config = Config.find(Path.cwd()).overruled(fail_on=fail_on)
    with Run(latest(path, lambda line: typer.echo(f"torchhook: {short(line)}", err=True))) as run:
        answer = run.why(config.fail_on)
    typer.echo(as_json(answer.to_dict()) if is_json else f"{answer}\n", nl=False)
    raise typer.Exit(answer.exit_code)
