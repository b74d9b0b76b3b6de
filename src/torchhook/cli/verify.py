"""``torchhook verify``: check a model against its contracts, and exit with code 1 if one is broken."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Annotated

import typer

from torchhook.cli.loaders import Shape, data_of, loss_of, model_of, wrong
from torchhook.cli.options import FailOn, Form, Model, Reports, Verbose
from torchhook.cli.outputs import Format, deliver, require_writable
from torchhook.core.progress import progress_bar

_BATCH, _CHECKED = "What to run it on", "What to check"


def verify(
    model: Model,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            rich_help_panel=_BATCH,
            help="Shape of a random input: 2,3,224,224, or 2,16:int for token ids. Repeat for each input.",
        ),
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_BATCH, help="Batches, or a function that returns them."),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_BATCH,
            help="A function of output and target, or the name of one in torch.nn.functional.",
        ),
    ] = None,
    contracts: Annotated[
        list[str] | None,
        typer.Option(
            "--contracts",
            metavar="NAMES",
            rich_help_panel=_CHECKED,
            help="Check only these, even if the model does not claim them: causal,padding.",
        ),
    ] = None,
    batch_dim: Annotated[
        int | None, typer.Option(metavar="N", min=0, rich_help_panel=_BATCH, help="Dimension of the samples.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=_BATCH, help="Device to run on: cuda, cpu, ...")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", rich_help_panel=_BATCH, help="Seed of weights and inputs.")] = 0,
    fail_on: FailOn = None,
    reports: Reports = None,
    form: Form = Format.TEXT,
    verbose: Verbose = False,
) -> None:
    """Check a model against contracts that any correct model of its kind obeys.

    Samples do not talk to each other, padding changes nothing, the future is not
    seen, cached decoding equals the full forward, and more. The first module that
    breaks one is named. NAME and MODEL are package.module:name.

    [bold]torchhook verify net:Net --input 2,3,64,64
    torchhook verify net:gpt --input 2,16:int --contracts causal,cached[/]
    """
    inputs = [Shape.of(text) for text in shapes or ()]
    if bool(inputs) == bool(loader):
        raise wrong("--input / --loader", "pass exactly one of the two, to say what to run the model on")
    if inputs and loss and ":" not in loss:
        raise wrong("--loss", f"{loss} needs targets, but random inputs have none: use --loader")
    names = [name.strip() for text in contracts or () for name in text.split(",") if name.strip()]
    require_writable(reports or ())
    with (
        progress_bar("loading", True) as progress,
        nullcontext() if form == Format.TEXT else redirect_stdout(sys.stderr),
    ):
        import torch

        from torchhook.rules.contracts.contract import chosen
        from torchhook.rules.verify import verify as check
        from torchhook.training.process import described, device_of, header

        try:
            chosen(names or None)
        except ValueError as error:
            raise wrong("--contracts", str(error).removeprefix("contracts: ")) from error
        torch.manual_seed(seed)
        net = model_of(model) if device is None else model_of(model).to(device)
        report = check(
            net,
            data_of(loader) if loader else (*(shape.random() for shape in inputs), None),
            loss_of(loss) if loss else None,
            names or None,
            batch_dim=batch_dim,
            fail_on=fail_on or "error",
            progress=progress or False,
        )
        report = replace(report, about=header({**described(), "device": device_of(net)}))
    deliver(report, form, reports or (), verbose)
    raise typer.Exit(report.exit_code)
