"""From what one writes on a command line to objects: ``pkg.module:name``, and shapes of inputs."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer


def named(target: str, option: str) -> Any:
    """The object that ``pkg.module:name`` names; modules in the current folder are found too."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise typer.BadParameter(f"{option} must be written as package.module:name, not {target!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found: Any = import_module(module)
    for part in name.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{option}: {module!r} has no {name!r}")
        found = getattr(found, part)
    return found


def model_of(target: str) -> Any:
    """The model that ``pkg.module:name`` names: a module, or a function or class that makes one."""
    from torch import nn

    found = named(target, "MODEL")
    model = found if isinstance(found, nn.Module) else found()
    if not isinstance(model, nn.Module):
        raise typer.BadParameter(f"{target} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def loss_of(target: str | None) -> Any:
    """The loss by its name in torch.nn.functional, or as ``pkg.module:name``."""
    import torch.nn.functional as F
    from torch import nn

    if target is None:
        return None
    found = named(target, "--loss") if ":" in target else getattr(F, target, None)
    if found is None:
        raise typer.BadParameter(f"--loss: torch.nn.functional has no {target!r}; or write package.module:name")
    return found() if isinstance(found, type) and issubclass(found, nn.Module) else found


def inputs_of(shapes: list[str]) -> tuple[Any, ...]:
    """Random inputs of some shapes: ``1,3,224,224`` are numbers, ``4,64:int`` whole ones, as for an embedding.

    >>> [(x.shape, x.dtype) for x in inputs_of(["2,3", "4:int"])]
    [(torch.Size([2, 3]), torch.float32), (torch.Size([4]), torch.int64)]
    """
    import torch

    inputs = []
    for text in shapes:
        sizes, _, kind = text.partition(":")
        if kind not in ("", "int", "float", "bool"):
            raise typer.BadParameter(f"--input: after the colon comes int, float or bool, not {kind!r}")
        try:
            shape = [int(size) for size in sizes.split(",")]
        except ValueError:
            raise typer.BadParameter(
                f"--input must be sizes with commas between, as 1,3,224,224, not {text!r}"
            ) from None
        is_whole = kind in ("int", "bool")
        x = torch.randint(0, 2 if kind == "bool" else 10, shape) if is_whole else torch.randn(shape)
        inputs.append(x.bool() if kind == "bool" else x)
    return tuple(inputs)
