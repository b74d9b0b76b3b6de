"""``torchhook harvest``: what a model does inside, for a whole data set, into files."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from torchhook.cli.loaders import data_of, model_of, named, wrong
from torchhook.cli.options import Model

_ROWS, _FILES, _ENGINE = "What to keep", "What to write", "Who works"


class Rows(str, Enum):
    """What a row is."""

    auto = "auto"
    sample = "sample"
    token = "token"


class Dtype(str, Enum):
    """As what numbers are stored."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    same = "same"


class Engine(str, Enum):
    """Who works."""

    local = "local"
    ray = "ray"


class OnError(str, Enum):
    """What to do about a sample that fails."""

    stop = "raise"
    skip = "skip"


def harvest(
    model: Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="package.module:name of a DataLoader, a data set, batches, or what makes them."
        ),
    ],
    sites: Annotated[
        list[str],
        typer.Option(metavar="PATHS", help="Of modules, as layer4,'blocks.*.mlp'. May be repeated."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder for it; one that was begun is gone on with.")],
    rows: Annotated[
        Rows, typer.Option(metavar="WHAT", rich_help_panel=_ROWS, help="What a row is: auto, sample or token.")
    ] = Rows.auto,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", rich_help_panel=_ROWS, help="Entries of the batches to keep: input_ids, target."),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_ROWS, help="package.module:name of a function of the output."),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", rich_help_panel=_ROWS, help="End each forward once all sites were seen.")
    ] = False,
    dtype: Annotated[
        Dtype, typer.Option(metavar="NAME", rich_help_panel=_FILES, help=", ".join(one.value for one in Dtype))
    ] = Dtype.float16,
    shard_mb: Annotated[
        float, typer.Option(metavar="MB", rich_help_panel=_FILES, help="About how much goes into a shard.")
    ] = 256,
    resume: Annotated[
        bool, typer.Option(rich_help_panel=_FILES, help="Go on with a folder that was begun, or refuse it.")
    ] = True,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=_ENGINE, help="For data that come in samples.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_ENGINE, help="Where to put the model: cuda, cpu, ..."),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(metavar="NAME", rich_help_panel=_ENGINE, help="local, or ray for several workers.")
    ] = Engine.local,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=_ENGINE, help="Actors of Ray.")
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(metavar="WHAT", rich_help_panel=_ENGINE, help="raise, or skip samples that fail and list them."),
    ] = OnError.stop,
    memory_mb: Annotated[
        float, typer.Option(metavar="MB", rich_help_panel=_ENGINE, help="The most rows to hold on their way.")
    ] = 1024,
) -> None:
    """Run a whole data set through a model, and keep what flows at some of its modules.

    MODEL and NAME are package.module:name, also of modules in the current folder.
    Run again after an interruption, it goes on where it was left.

    [bold]torchhook harvest net:model --data net:loader --sites layer3,layer4 --out acts
    torchhook harvest net:gpt --data net:texts --sites 'h.6' --out acts --stop --keep input_ids[/]
    """
    from torchhook.activations.harvest import harvest as run

    net = model_of(model)
    acts = run(
        net if device is None else net.to(device),
        data_of(data, "--data"),
        [site.strip() for text in sites for site in text.split(",") if site.strip()],
        out,
        transform=None if transform is None else _function(transform),
        dtype=None if dtype is Dtype.same else dtype.value,
        rows=rows.value,
        keep=[name.strip() for text in keep or () for name in text.split(",")],
        batch_size=batch_size,
        shard_mb=shard_mb,
        resume=resume,
        engine=engine.value,
        workers=workers,
        on_error=on_error.value,
        memory_mb=memory_mb,
        stop=stop,
    )
    typer.echo(acts)
    typer.echo(f"written: {out}")


def _function(target: str) -> Callable[[Any], Any]:
    found = named(target, "--transform")
    if not callable(found):
        raise wrong("--transform", f"{target} is {found!r:.60}, which cannot be called")
    return found  # type: ignore[no-any-return]  # it was imported by its name
