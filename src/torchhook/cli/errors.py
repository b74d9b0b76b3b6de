"""What fails ends with 2 and a sentence; findings end with 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def told() -> Iterator[None]:
    """Say in a line what was raised, and end with 2. With TORCHHOOK_TRACEBACK set, raise it as it is."""
    try:
        yield
    except (typer.Exit, typer.Abort, typer.BadParameter, KeyboardInterrupt):
        raise
    except Exception as error:
        if os.environ.get("TORCHHOOK_TRACEBACK"):
            raise
        typer.echo(f"torchhook: {type(error).__name__}: {error}", err=True)
        typer.echo("(set TORCHHOOK_TRACEBACK=1 for the traceback)", err=True)
        raise typer.Exit(2) from None
