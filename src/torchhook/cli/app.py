"""All commands in one application."""

from __future__ import annotations

import typer

from torchhook.cli import diagnose, replay, rules

app = typer.Typer(
    name="torchhook",
    help="See, record, change and diagnose what happens inside a PyTorch model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("diagnose")(diagnose.diagnose)
app.command("rules")(rules.rules)
app.command("replay")(replay.replay)
