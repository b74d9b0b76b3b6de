"""``torchhook harvest``: run a whole data set through a model and write its activations to files."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from torchhook.cli.loaders import data_of, function_of, model_of
from torchhook.cli.options import Model
from torchhook.core.text import size_of

_ROWS, _FILES, _ENGINE = "What to keep", "What to write", "How to run"


class RowUnit(str, Enum):
    """What one row is."""

    auto = "auto"
    sample = "sample"
    token = "token"


class Dtype(str, Enum):
    """How floating-point values are stored."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    same = "same"


class Engine(str, Enum):
    """What runs the model."""

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
            metavar="NAME", help="package.module:name of a DataLoader, data set or batches, or of a function for them."
        ),
    ],
    sites: Annotated[
        list[str],
        typer.Option(metavar="PATHS", help="Paths of modules, such as layer4,'blocks.*.mlp'. May be repeated."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write to; resumes if it was started.")],
    rows: Annotated[
        RowUnit, typer.Option(metavar="WHAT", rich_help_panel=_ROWS, help="What one row is: auto, sample or token.")
    ] = RowUnit.auto,
    keep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", rich_help_panel=_ROWS, help="Entries of the batches to keep: input_ids, target."),
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_ROWS, help="package.module:name of a function of an output."),
    ] = None,
    stop: Annotated[
        bool, typer.Option("--stop", rich_help_panel=_ROWS, help="End each forward pass once all sites were called.")
    ] = False,
    dtype: Annotated[
        Dtype, typer.Option(metavar="NAME", rich_help_panel=_FILES, help=", ".join(one.value for one in Dtype) + ".")
    ] = Dtype.float16,
    shard_bytes: Annotated[
        int,
        typer.Option(metavar="SIZE", rich_help_panel=_FILES, parser=size_of, help="Size of a shard, about: 256MiB."),
    ] = "256MiB",  # type: ignore[assignment]  # the parser makes it an int
    resume: Annotated[
        bool, typer.Option(rich_help_panel=_FILES, help="Resume in a folder that has activations, or refuse it.")
    ] = True,
    batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=_ENGINE, help="For data that are single samples.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=_ENGINE, help="Device to move the model to: cuda, cpu, ..."),
    ] = None,
    engine: Annotated[
        Engine, typer.Option(metavar="NAME", rich_help_panel=_ENGINE, help="local, or ray for several workers.")
    ] = Engine.local,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, rich_help_panel=_ENGINE, help="Number of Ray actors.")
    ] = None,
    on_error: Annotated[
        OnError,
        typer.Option(metavar="WHAT", rich_help_panel=_ENGINE, help="raise, or skip samples that fail and list them."),
    ] = OnError.stop,
    memory_bytes: Annotated[
        int,
        typer.Option(
            metavar="SIZE",
            rich_help_panel=_ENGINE,
            parser=size_of,
            help="Rows a worker may hold in memory: 1GiB.",
        ),
    ] = "1GiB",  # type: ignore[assignment]  # as above
    shard_mb: Annotated[float | None, typer.Option(hidden=True)] = None,
    memory_mb: Annotated[float | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a whole data set through a model and write the outputs of some modules to files.

    MODEL and NAME are package.module:name; modules in the current folder work, too.
    Run the same command again to resume after an interruption.

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
        transform=None if transform is None else function_of(transform, "--transform"),
        dtype=None if dtype is Dtype.same else dtype.value,
        rows=rows.value,
        keep=[name.strip() for text in keep or () for name in text.split(",")],
        batch_size=batch_size,
        resume=resume,
        engine=engine.value,
        workers=workers,
        on_error=on_error.value,
        stop=stop,
        **_sizes(shard_bytes, memory_bytes, shard_mb, memory_mb),
    )
    typer.echo(acts)
    typer.echo(f"written: {out}")


def _sizes(shard: int, memory: int, old_shard: float | None, old_memory: float | None) -> dict[str, Any]:
    """The sizes, under their old names where those were given: `harvest` warns about them."""
    return {
        **({"shard_bytes": shard} if old_shard is None else {"shard_mb": old_shard}),
        **({"memory_bytes": memory} if old_memory is None else {"memory_mb": old_memory}),
    }
