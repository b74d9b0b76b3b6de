"""``torchhook diagnose``: inspect a model, and exit with code 1 if something is wrong."""

from __future__ import annotations

import random
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from torchhook.cli.loaders import Shape, data_of, loss_of, model_of, optimizer_of, split, wrong
from torchhook.cli.options import FailOn, Form, Ignore, Model, Reports, Select, Verbose
from torchhook.cli.outputs import Format, deliver, require_writable
from torchhook.core.config import Config
from torchhook.core.progress import progress_bar

_BATCHES = 4
_TASK = "What to train on"


def diagnose(
    model: Model,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            rich_help_panel=_TASK,
            help="Shape of a random input: 2,3,224,224, or 2,64:int for an embedding. Repeat for each input.",
        ),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", rich_help_panel=_TASK, help="Batches (input, target), or a function that returns them."
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_TASK,
            help="A function of output and target, or the name of one in torch.nn.functional.",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_TASK,
            help="A function that creates it from the model, or the name of a class in torch.optim.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=0, rich_help_panel=_TASK, help="Steps to train a copy for; 0 for none.")
    ] = 100,
    no_try: Annotated[
        bool, typer.Option("--no-try", rich_help_panel=_TASK, help="Do not try repairs of what is found on the copy.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(metavar="S", min=0, rich_help_panel=_TASK, help="How long to try repairs for, at most.")
    ] = 10.0,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=_TASK, help="Device to run on: cuda, cpu, ...")
    ] = None,
    seed: Annotated[
        int,
        typer.Option(metavar="N", rich_help_panel=_TASK, help="Random seed, for reproducible findings."),
    ] = 0,
    select: Select = None,
    ignore: Ignore = None,
    fail_on: FailOn = None,
    reports: Reports = None,
    form: Form = Format.TEXT,
    verbose: Verbose = False,
) -> None:
    """Inspect a model at rest, in one pass, and in a short training of a copy.

    NAME and MODEL are package.module:name; modules in the current folder are
    found, too. With --input there are no targets, and nothing is trained.
    Rules can also be configured in pyproject.toml: \\[tool.torchhook] with select,
    ignore, fail-on and per-module-ignores. Options given here take precedence.

    [bold]torchhook diagnose torchvision.models:resnet18 --input 2,3,224,224
    torchhook diagnose net:Net --loader data:batches --report report.html[/]
    """
    inputs = [Shape.of(text) for text in shapes or ()]
    if bool(inputs) == bool(loader):
        raise wrong("--input / --loader", "pass exactly one of the two, to say what to run the model on")
    if inputs and loss and ":" not in loss:
        raise wrong("--loss", f"{loss} needs targets, but random inputs have none: use --loader")
    require_writable(reports or ())
    config = Config.find(Path.cwd()).overruled(split(select), split(ignore), fail_on)
    # Output of the user's own code must not get between the lines that a program reads.
    with (
        progress_bar("loading", True) as progress,
        nullcontext() if form == Format.TEXT else redirect_stdout(sys.stderr),
    ):
        from torchhook.rules import chosen
        from torchhook.rules.diagnose import diagnose as inspect
        from torchhook.training.process import described, device_of, header

        chosen(config.select, config.ignore)  # raises if one is unknown
        _seed(seed)
        net = model_of(model) if device is None else model_of(model).to(device)
        data = data_of(loader) if loader else _random(inputs)
        report = inspect(
            net,
            data,
            loss_of(loss) if loss else None,
            optimizer_of(optimizer, net) if optimizer else None,
            steps,
            try_repairs=not no_try,
            seconds=seconds,
            progress=progress or False,
            **config.arguments(),
        )
        report = replace(report, about=header({**described(), "device": device_of(net)}))
    deliver(report, form, reports or (), verbose)
    raise typer.Exit(report.exit_code)


def _random(inputs: list[Shape]) -> list[tuple[Any, ...]]:
    """A few batches of random inputs, without targets."""
    return [(*(shape.random() for shape in inputs), None) for _ in range(_BATCHES)]


def _seed(seed: int) -> None:
    import torch

    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
