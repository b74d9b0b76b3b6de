"""``torchhook replay``: show again what `catch_nonfinite` has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchhook.cli.errors import told


def replay(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="What catch_nonfinite(save=...) wrote.")],
    model: Annotated[str, typer.Option(help="What makes the model: package.module:name.")],
) -> None:
    """Run a call that was saved by catch_nonfinite once more, and show where it makes NaN or Inf.

    Ends with 1 if it does again, with 0 if all is finite this time.
    """
    with told():
        from torchhook.cli.loading import model_of
        from torchhook.origins import replay as run

        origin = run(file, model_of(model))
        typer.echo(origin.message() if origin is not None else "everything was finite this time")
    raise typer.Exit(1 if origin is not None else 0)
