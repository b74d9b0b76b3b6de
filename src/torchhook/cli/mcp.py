"""``torchhook mcp``: a server of tools for agents that watch trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def mcp(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder that holds the runs.")] = Path("runs"),
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Also offer diagnose, which runs code that the agent names.")
    ] = False,
    seconds: Annotated[float, typer.Option(metavar="S", min=1, help="How long a diagnosis may take, at most.")] = 120.0,
) -> None:
    """Serve what was recorded to agents, over the Model Context Protocol (stdio).

    Agents start this command themselves: add it to their configuration.
    Its tools only read, and only runs in FOLDER: list_runs, why, series,
    layers, compare_runs and rules.

    [bold]torchhook mcp runs[/]
    """
    from torchhook.integrations.mcp import server

    server(folder, allow_code, seconds).run()
