"""``torchhook diff``: where two models part, and 1 at the end if they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchhook.cli.loaders import Shape, loss_of, model_of, wrong
from torchhook.render.words import printable

if TYPE_CHECKING:
    from torch import nn

    from torchhook.compare.diff.result import Difference


def diff(
    a: Annotated[
        str,
        typer.Argument(metavar="A", help="package.module:name of a model, or of a function or class that makes one."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same of the other model.")],
    shapes: Annotated[
        list[str],
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Random inputs, as 2,3,224,224, or 2,64:int for an embedding; once for each input of the models.",
        ),
    ],
    loss: Annotated[
        str | None, typer.Option(metavar="NAME", help="A function of the output, to compare gradients from, too.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", min=0.0, help="Part at this relative error, whatever the dtype explains."),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(metavar="A=B", help="What a module of A, with all below it, is called in B. May be repeated."),
    ] = None,
    evaluated: Annotated[bool, typer.Option("--eval", help="Put both in eval mode first.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the random input, and of each model that is made.")] = 0,
) -> None:
    """Run two models on the same input, and say where they first part.

    A, B and NAME are package.module:name, also of modules in the current folder.
    Rounding is not held against them: float32 and bfloat16 do not part.
    Ends with 0 if they are the same, with 1 if they part.

    [bold]torchhook diff net:original net:ported --input 2,3,224,224 --eval[/]
    """
    inputs = [Shape.of(text) for text in shapes]
    if loss is not None and ":" not in loss:
        raise wrong("--loss", f"{loss} compares with targets, which random inputs have not: write package.module:name")
    renamed = dict(_pair(text) for text in match or ())

    import torch

    from torchhook.compare.diff.verb import diff as compare

    models = [_made(name, option, seed, evaluated) for name, option in ((a, "A"), (b, "B"))]
    torch.manual_seed(seed)
    x = tuple(shape.random() for shape in inputs)
    found = compare(models[0], models[1], x, loss_of(loss) if loss else None, tolerance, renamed or None)
    _show(found)
    raise typer.Exit(0 if found.same else 1)


def _made(name: str, option: str, seed: int, evaluated: bool) -> nn.Module:
    import torch

    torch.manual_seed(seed)  # so that two that are made alike are alike
    model = model_of(name, option)
    return model.eval() if evaluated else model


def _pair(text: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not equals:
        raise wrong("--match", f"write path-in-A=path-in-B, not {text!r}")
    return left, right


def _show(found: Difference) -> None:
    """A table on a terminal, elsewhere lines to be searched; and what it comes to last, where one looks."""
    console = Console(highlight=False)
    if console.is_terminal:
        shown = Table(*found.HEADER, box=None, pad_edge=False, header_style="bold")
        for row in found.table:
            cells = [Text(printable(str(cell)), overflow="fold") for cell in row.cells()]
            shown.add_row(*cells, style="bold red" if row.parts else "")
        console.print(shown)
    else:
        from torchhook.core.text import table

        typer.echo(_printable(table(found.HEADER, [row.cells() for row in found.table])))
    for line in found.lines():
        console.print(Text(printable(line)), style="dim", soft_wrap=True)
    console.print(Text(printable(found.verdict)), style="bold green" if found.same else "bold red", soft_wrap=True)


def _printable(text: str) -> str:
    """`text` without characters that a terminal should not get, its lines kept."""
    return "\n".join(map(printable, text.splitlines()))
