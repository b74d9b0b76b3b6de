"""Turns arguments of the command line into objects: ``package.module:name``, and shapes of inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from torch import Tensor, nn


class Shape(NamedTuple):
    """The shape of a random input, and the kind of its numbers."""

    sizes: tuple[int, ...]
    kind: str = "float"

    @classmethod
    def of(cls, text: str) -> Shape:
        """Parse a shape such as ``1,3,224,224``, or ``4,64:int`` for an embedding.

        >>> Shape.of("4,64:int")
        Shape(sizes=(4, 64), kind='int')
        """
        sizes, _, kind = text.partition(":")
        if kind not in ("", "bool", "float", "int"):
            raise wrong("--input", f"the kind after the colon must be int, float or bool, not {kind!r}")
        if not all(size.strip().isdecimal() and int(size) for size in sizes.split(",")):
            raise wrong("--input", f"write sizes separated by commas, such as 1,3,224,224, not {text!r}")
        return cls(tuple(map(int, sizes.split(","))), kind or "float")

    def random(self) -> Tensor:
        """A random input: standard normal numbers, integers below ten, or booleans."""
        import torch

        if self.kind == "float":
            return torch.randn(self.sizes)
        return torch.randint(10, self.sizes) if self.kind == "int" else torch.rand(self.sizes) < 0.5


def model_of(target: str, option: str = "MODEL") -> nn.Module:
    """The model that ``package.module:name`` names: a module, or a function or class that creates one."""
    from torch import nn

    found = named(target, option)
    model = found if isinstance(found, nn.Module) else _called(found, target)
    if not isinstance(model, nn.Module):
        raise wrong(option, f"{target} is or returns {model!r:.60}, which is not a torch.nn.Module")
    return model


def data_of(target: str, option: str = "--loader") -> Any:
    """The batches that ``package.module:name`` names or returns."""
    found = named(target, option)
    return _called(found, target) if callable(found) else found


def loss_of(target: str) -> Callable[[Any, Any], Any]:
    """The loss, by its name in torch.nn.functional or as ``package.module:name``."""
    from torch import nn

    found = named(target if ":" in target else f"torch.nn.functional:{target}", "--loss")
    made = _called(found, target) if isinstance(found, type) and issubclass(found, nn.Module) else found
    return _callable(made, target, "--loss")


def function_of(target: str, option: str) -> Callable[..., Any]:
    """The function that ``package.module:name`` names."""
    return _callable(named(target, option), target, option)


def optimizer_of(target: str, model: nn.Module) -> Any:
    """The optimizer: a class by its name in torch.optim, or what ``package.module:name`` creates from the model."""
    from torch.optim import Optimizer

    found = named(target if ":" in target else f"torch.optim:{target}", "--optimizer")
    whole = isinstance(found, type) and issubclass(found, Optimizer)
    return _called(found, target, model.parameters() if whole else model)


def named(target: str, option: str) -> Any:
    """The object that ``package.module:name`` names; modules in the current folder are found, too."""
    module, _, name = target.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        raise wrong(option, f"write it as an import, {dotted}:{name or 'name'}, not as a path, {target}")
    if not module.strip(".") or not name:
        raise wrong(option, f"write package.module:name, not {target!r}")
    found: Any = _imported(module, option)
    for part in name.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), 3)
            raise wrong(option, f"{module} has no {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
        found = getattr(found, part)
    return found


def wrong(option: str, why: str) -> typer.BadParameter:
    """An error that an option was used wrongly, and why."""
    return typer.BadParameter(why, param_hint=option)


def split(texts: Iterable[str] | None) -> list[str]:
    """The words of a repeated or comma-separated option; codes in capitals.

    >>> split(["th1,TH202", "loss-spike"])
    ['TH1', 'TH202', 'loss-spike']
    """
    words = [word.strip() for text in texts or () for word in text.split(",")]
    return [word.upper() if word[-1:].isdigit() else word for word in words if word]


def _callable(found: Any, target: str, option: str) -> Callable[..., Any]:
    if not callable(found):
        raise wrong(option, f"{target} is {found!r:.60}, which is not callable")
    return found  # type: ignore[no-any-return]  # imported by name


def _imported(module: str, option: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with _exit_refused(f"importing {module}"):
            return import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise wrong(option, f"there is no module {error.name!r}, neither installed nor in {here}") from error
        raise


def _called(maker: Callable[..., Any], target: str, *args: Any) -> Any:
    with _exit_refused(target):
        return maker(*args)


@contextmanager
def _exit_refused(what: str) -> Iterator[None]:
    """Turn SystemExit into an error: a script that exits when it is imported must not look like success."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(f"{what} ended with sys.exit({error.code!r})") from error
