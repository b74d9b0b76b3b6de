"""``torchhook diff``: where two models diverge; exit code 1 if they do."""

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
        typer.Argument(metavar="A", help="package.module:name of a model, or of a function or class that returns one."),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same for the other model.")],
    shapes: Annotated[
        list[str],
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Shape of a random input: 2,3,224,224, or 2,64:int for token ids. Repeat it for each input.",
        ),
    ],
    loss: Annotated[
        str | None, typer.Option(metavar="NAME", help="A loss function of the output; also compares gradients.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", min=0.0, help="Diverge above this relative error, whatever rounding explains."),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(metavar="A=B", help="Path of a module in A and its path in B, with all below. Repeatable."),
    ] = None,
    evaluated: Annotated[bool, typer.Option("--eval", help="Put both models in eval mode first.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random input and of each model's weights.")] = 0,
) -> None:
    """Run two models on the same input and find where they first diverge.

    A, B and NAME are package.module:name; modules in the current folder work too.
    Rounding does not count: float32 and bfloat16 copies of a model agree.
    Exits with 0 if they agree and with 1 if they diverge.

    [bold]torchhook diff net:original net:ported --input 2,3,224,224 --eval[/]
    """
    inputs = [Shape.of(text) for text in shapes]
    if loss is not None and ":" not in loss:
        raise wrong(
            "--loss",
            f"{loss} needs targets, but random inputs have none: pass package.module:name of a loss of the output",
        )
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

    torch.manual_seed(seed)  # the same weights for the same code
    model = model_of(name, option)
    return model.eval() if evaluated else model


def _pair(text: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not equals:
        raise wrong("--match", f"must be path-in-A=path-in-B, not {text!r}")
    return left, right


def _show(found: Difference) -> None:
    """Print a table in a terminal and plain lines elsewhere; the verdict comes last, where people look."""
    console = Console(highlight=False)
    if console.is_terminal:
        shown = Table(*found.HEADER, box=None, pad_edge=False, header_style="bold")
        for row in found.rows:
            cells = [Text(printable(str(cell)), overflow="fold") for cell in row.cells()]
            shown.add_row(*cells, style="bold red" if row.parts else "")
        console.print(shown)
    else:
        from torchhook.core.text import table

        typer.echo(_printable(table(found.HEADER, [row.cells() for row in found.rows])))
    for line in found.lines():
        console.print(Text(printable(line)), style="dim", soft_wrap=True)
    console.print(Text(printable(found.verdict)), style="bold green" if found.same else "bold red", soft_wrap=True)


def _printable(text: str) -> str:
    """`text` without control characters, line by line."""
    return "\n".join(map(printable, text.splitlines()))
