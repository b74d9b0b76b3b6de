"""``torchhook dashboard``: runs in the browser, live."""

from __future__ import annotations

import threading
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from torchhook.core.optional import require


def dashboard(
    path: Annotated[Path, typer.Argument(metavar="RUN | FOLDER", help="A run, or a folder with runs.")] = Path("runs"),
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="0 for any that is free.")] = 8787,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="Where to listen. Beyond this machine a token is asked for.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="TORCHHOOK_TOKEN", help="The token; if not said, a new one is made."),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Look at runs in the browser, while they are written and afterwards.

    It reads what is on disk, and asks the network for nothing.
    Its address is printed; Ctrl-C ends it.

    [bold]torchhook dashboard runs/latest --open[/]
    """
    require("dash", "dashboard", "the dashboard")
    from torchhook.dashboard.server import Server

    server = Server(path, host, port, token)
    typer.echo(server.address)
    if is_opened:
        threading.Timer(0.5, webbrowser.open, [server.address]).start()
    try:
        server.serve()
    except KeyboardInterrupt:
        typer.echo(err=True)
