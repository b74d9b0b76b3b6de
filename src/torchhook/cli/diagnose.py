"""``torchhook diagnose``: inspect a model, and end with 1 if something is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torchhook.cli.errors import told

_BATCHES = 4


def diagnose(
    model: Annotated[
        str, typer.Argument(help="What makes the model: package.module:name, a function, class or object.")
    ],
    shapes: Annotated[
        list[str] | None,
        typer.Option("--input", help="The shape of a random input, as 1,3,224,224 or 4,64:int; once for each input."),
    ] = None,
    loader: Annotated[
        str | None, typer.Option(help="What makes the batches, (input, target): package.module:name.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(help="The loss: a name of torch.nn.functional, or package.module:name.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="What makes the optimizer, called with the model: package.module:name.")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="How many steps to train a copy for; 0 for none.")] = 100,
    device: Annotated[str | None, typer.Option(help="Where to put the model, as cuda.")] = None,
    select: Annotated[list[str] | None, typer.Option(help="Only these rules: codes, or beginnings of them.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Not these rules.")] = None,
    fail_on: Annotated[str | None, typer.Option(help="End with 1 from this on: info, warning or error.")] = None,
    report: Annotated[
        list[Path] | None, typer.Option(help="Where to write the report: .html, .json, .xml (JUnit) or .md.")
    ] = None,
) -> None:
    """Inspect a model: at rest, in a forward and backward, and in a short training of a copy.

    torchhook diagnose torchvision.models:resnet18 --input 2,3,224,224 --report out.html
    """
    with told():
        from torchhook import diagnosing, render
        from torchhook.cli.loading import inputs_of, loss_of, model_of, named
        from torchhook.cli.progress import bar
        from torchhook.config import Config

        if not shapes and not loader:
            raise typer.BadParameter(
                "what is the model to be given? --input 1,3,224,224 or --loader package.module:name"
            )
        config = Config.find(Path.cwd())
        net = model_of(model)
        net = net if device is None else net.to(device)
        data: Any = named(loader, "--loader")() if loader else [inputs_of(shapes or []) for _ in range(_BATCHES)]
        data = data if loader else [(*inputs, None) for inputs in data]
        with bar() as progress:
            found = diagnosing.diagnose(
                net,
                data,
                loss_of(loss),
                named(optimizer, "--optimizer")(net) if optimizer else None,
                steps,
                rules=select or config.select,
                ignore=(*config.ignore, *(ignore or ())),
                per_module=config.per_module,
                fail_on=fail_on or config.fail_on,
                progress=progress,
            )
        render.terminal(found)
        for path in report or []:
            render.save(found, path)
            typer.echo(f"written: {path}", err=True)
    raise typer.Exit(found.exit_code)
