"""``torchhook diff``: where two models or recordings diverge; exit code 1 if they do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchhook.cli.loaders import Shape, loss_of, model_of, wrong
from torchhook.render.words import printable

if TYPE_CHECKING:
    from torch import nn

    from torchhook.compare.diff.result import Difference

_FORMATS = (".html", ".json", ".th")


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A recording, or package.module:name of a model, or of a function or class that returns one.",
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same for the other one; ranks are separated by commas.")],
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="Shape of a random input: 2,3,224,224, or 2,64:int for token ids. Repeat it for each input.",
        ),
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="NAME", help="A loss function of the output; also compares gradients.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", min=0.0, help="Diverge above this relative error, whatever rounding explains."),
    ] = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B",
            help="Path of a module in A and its path in B, with all below; or a TOML file of these. Repeatable.",
        ),
    ] = None,
    evaluated: Annotated[bool, typer.Option("--eval", help="Put models in eval mode first.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the random input and of each model's weights.")] = 0,
    report: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Write the result: .html, .json, or .th for the dashboard. Repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    save_match: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write which modules were compared to a TOML file.")
    ] = None,
) -> None:
    """Find where two models first diverge, each of which is run here or was recorded.

    A, B and NAME are package.module:name; modules in the current folder work too.
    Rounding does not count: float32 and bfloat16 copies of a model agree.
    Exits with 0 if they agree, with 1 if they diverge and with 2 if a recording ends before the model returned.

    [bold]torchhook diff net:original net:ported --input 2,3,224,224 --eval
    torchhook diff a.th b.th --match map.toml --report diff.html[/]
    """
    inputs = [Shape.of(text) for text in shapes or ()]
    if loss is not None and ":" not in loss:
        raise wrong(
            "--loss",
            f"{loss} needs targets, but random inputs have none: pass package.module:name of a loss of the output",
        )
    for path in report or ():
        if path.suffix.lower() not in _FORMATS:
            raise wrong("--report", f"{path.name!r} must end in {', '.join(_FORMATS)}")
    renamed = _match(match or [])

    import torch

    from torchhook.compare.diff.verb import diff as compare

    sides = [_side(name, option, seed, evaluated) for name, option in ((a, "A"), (b, "B"))]
    models = [side for side in sides if isinstance(side, torch.nn.Module)]
    if len(models) == 2 and not inputs:
        raise wrong("--input", "two models need the shape of an input to run on")
    torch.manual_seed(seed)
    x = tuple(shape.random() for shape in inputs) if inputs else None
    found = compare(sides[0], sides[1], x, loss_of(loss) if loss else None, tolerance, renamed)
    if as_json:
        typer.echo(json.dumps(found.to_dict()))
    else:
        _show(found)
    _write(found, report or [], save_match)
    raise typer.Exit(1 if not found.same else 0 if found.complete else 2)


def _side(name: str, option: str, seed: int, evaluated: bool) -> Any:
    """A model, or the paths of recordings."""
    paths = name.split(",")
    if all(Path(path).exists() for path in paths):
        return paths
    if ":" not in name:
        raise wrong(option, f"there is no recording {name!r}; a model is package.module:name")
    return _made(name, option, seed, evaluated)


def _match(texts: list[str]) -> Any:
    """The map that was given: one file, or pairs of paths."""
    if len(texts) == 1 and texts[0].endswith(".toml"):
        return texts[0]
    return dict(_pair(text) for text in texts) or None


def _write(found: Difference, reports: list[Path], save_match: Path | None) -> None:
    from torchhook import render

    for path in reports:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(found.to_dict(), indent=1), encoding="utf-8")
        else:
            render.save(found, path)
        typer.echo(f"written: {path}", err=True)
    if save_match is not None:
        found.match.save(save_match)
        typer.echo(f"written: {save_match}", err=True)


def _made(name: str, option: str, seed: int, evaluated: bool) -> nn.Module:
    import torch

    torch.manual_seed(seed)  # the same weights for the same code
    model = model_of(name, option)
    return model.eval() if evaluated else model


def _pair(text: str) -> tuple[str, str]:
    left, equals, right = text.partition("=")
    if not equals:
        raise wrong("--match", f"must be path-in-A=path-in-B, not {text!r} (the name of a file ends in .toml)")
    return left, right


def _show(found: Difference) -> None:
    """Print a table in a terminal and plain lines elsewhere; the verdict comes last, where people look."""
    console = Console(highlight=False)
    if console.is_terminal:
        shown = Table(*found.HEADER, box=None, pad_edge=False, header_style="bold")
        for row in found.shown:
            cells = [Text(printable(str(cell)), overflow="fold") for cell in row.cells()]
            shown.add_row(*cells, style="bold red" if row.parts else "")
        console.print(shown)
    else:
        from torchhook.core.text import table

        typer.echo(_printable(table(found.HEADER, [row.cells() for row in found.shown])))
    for line in found.lines():
        console.print(Text(printable(line)), style="dim", soft_wrap=True)
    style = "bold red" if not found.same else "bold green" if found.complete else "bold yellow"
    console.print(Text(printable(found.verdict)), style=style, soft_wrap=True)


def _printable(text: str) -> str:
    """`text` without control characters, line by line."""
    return "\n".join(map(printable, text.splitlines()))
