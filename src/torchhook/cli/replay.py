"""``torchhook replay``: show again what `catch_nonfinite` has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            exists=True, dir_okay=False, metavar="FILE", help="What catch_nonfinite(model, save=...) has written."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help="What the call was of: a model, or a function or class that makes one."),
    ],
) -> None:
    """Run a call that catch_nonfinite saved, and show where NaN or Inf begins.

    Weights, arguments and random states are those of the file.
    Ends with 1 if it shows again, with 0 if all is finite this time.

    [bold]torchhook replay nonfinite_head_forward_3.safetensors --model net:make[/]
    """
    from torchhook.cli.loaders import model_of
    from torchhook.origins import replay as run

    origin = run(file, model_of(model, "--model"))
    shown = bool(origin.op or origin.came_with)
    lines = [origin.message(), origin.hint] if shown else ["All is finite this time. Saved was:", origin.message()]
    typer.echo("\n".join(filter(None, lines)))
    raise typer.Exit(1 if shown else 0)
