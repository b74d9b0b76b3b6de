"""``torchhook dashboard``: runs in the browser, live, and saved results."""

from __future__ import annotations

import os
import signal
import threading
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import typer

from torchhook.core.optional import require


def dashboard(
    path: Annotated[
        Path, typer.Argument(metavar="RUN | RESULT | FOLDER", help="A run, a saved result, or a folder of these.")
    ] = Path("runs"),
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8787,
    host: Annotated[
        str, typer.Option(metavar="NAME", help="Address to listen on. Other machines need a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", envvar="TORCHHOOK_TOKEN", help="The token; by default a random one."),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open the browser.")] = False,
) -> None:
    """Show runs in the browser, live while they are written, and results saved as .th.

    The dashboard reads them from disk and makes no network requests.
    It prints its address; press Ctrl-C to stop it.

    [bold]torchhook dashboard runs/latest --open[/]
    """
    require("dash", "dashboard", "the dashboard")
    from torchhook.dashboard.server import Server

    # Where a parent ignores it, or as the first process of a container, the signal would have no effect.
    signal.signal(signal.SIGTERM, _end)
    server = Server(path, host, port, token)
    typer.echo(server.address)
    if is_opened:
        threading.Timer(0.5, webbrowser.open, [server.address]).start()
    try:
        server.serve()
    except KeyboardInterrupt:
        typer.echo(err=True)


def _end(number: int, frame: Any) -> None:
    os._exit(128 + number)  # taking down the interpreter may take seconds, and nothing here is written
