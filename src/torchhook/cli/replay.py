"""``torchhook replay``: rerun a call that `catch_nonfinite` saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, metavar="FILE", help="A file written by catch_nonfinite(model, save=...)."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="The model of the call, or a function or class that creates it."),
    ],
) -> None:
    """Rerun a call that catch_nonfinite saved, and show where NaN or Inf begins.

    Weights, arguments and random states come from the file.
    Exits with 1 if NaN or Inf appears again, with 0 if all is finite.

    [bold]torchhook replay nonfinite_head_forward_3.safetensors --model net:make[/]
    """
    from torchhook.cli.loaders import model_of
    from torchhook.origins import replay as run

    origin = run(file, model_of(model, "--model"))
    shown = bool(origin.op or origin.came_with)
    lines = (
        [origin.message(), origin.hint]
        if shown
        else ["All values are finite this time. The saved call was:", origin.message()]
    )
    typer.echo("\n".join(filter(None, lines)))
    raise typer.Exit(1 if shown else 0)
