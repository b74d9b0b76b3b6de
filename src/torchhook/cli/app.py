"""The application with all commands."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.main import get_command

from torchhook import __version__
from torchhook.cli import (
    dashboard,
    diagnose,
    diff,
    doctor,
    explain,
    harvest,
    mcp,
    record,
    replay,
    rules,
    run,
    runs,
    verify,
    why,
)

app = typer.Typer(
    name="torchhook",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command("run", context_settings=run.PARSING)(run.run)
app.command("why")(why.why)
app.add_typer(runs.app, name="runs")
app.command("dashboard")(dashboard.dashboard)
app.command("mcp")(mcp.mcp)
app.command("diagnose")(diagnose.diagnose)
app.command("verify")(verify.verify)
app.command("rules")(rules.rules)
app.command("replay")(replay.replay)
app.command("record", context_settings=record.PARSING)(record.record)
app.command("diff")(diff.diff)
app.command("explain")(explain.explain)
app.command("harvest")(harvest.harvest)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"torchhook {__version__}")
        raise typer.Exit


@app.callback()
def torchhook(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """See, record, change and diagnose what happens inside a PyTorch model.

    Exit codes: 0 if all is well, 1 if something was found, 2 for a failure;
    run and record end like the script that they run.
    """


command = get_command(app)
"""The parser itself: `app` would install a hook for uncaught exceptions into the process, which may run a script."""
