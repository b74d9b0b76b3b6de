"""`Worst`: the layers that differ most, and their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import nn

from torchhook.core.selection import walk


class Compared(Protocol):
    """A layer that was compared."""

    @property
    def other(self) -> str:
        """The name of what was compared with the reference."""

    @property
    def paired(self) -> str:
        """The layer, with the address of a tensor if its output is not a single one."""

    @property
    def distance(self) -> float:
        """How far it is from the reference."""


@dataclass(frozen=True, eq=False, repr=False)
class Worst:
    """Some layers of a model, those that differ most first. Iterating gives their paths.

    Args:
        paths: The paths of the layers.
        distances: How far each is from the reference, in standard deviations.
        names: The names of their parameters, as in ``model.named_parameters()``.
    """

    paths: tuple[str, ...]
    distances: tuple[float, ...]
    names: tuple[str, ...]
    _parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, ranked: Iterable[Compared], models: Mapping[str, weakref.ref[nn.Module]], k: int) -> Worst:
        """The first `k` of the ranked layers that have parameters, each once."""
        found: dict[tuple[str, str], float] = {}
        named: dict[str, nn.Parameter] = {}
        if not models:
            raise ReferenceError("this result is a copy, or was read from a file: only the original has the parameters")
        modules = {name: dict(walk(_alive(model()))) for name, model in models.items()}
        for row in ranked:
            path = row.paired.partition("[")[0]
            own = dict(modules[row.other][path].named_parameters(path))
            if own and len(found) < k and (row.other, path) not in found:
                found[row.other, path] = row.distance
                several = f"{row.other}: " if len(models) > 1 else ""
                named |= {several + name: parameter for name, parameter in own.items()}
        once = {id(parameter): parameter for parameter in named.values()}
        return cls(tuple(path for _, path in found), tuple(found.values()), tuple(named), tuple(once.values()))

    def parameters(self) -> Iterator[nn.Parameter]:
        """Their parameters, each once: what to give to an optimizer."""
        return iter(self._parameters)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self._parameters)
        shown = ", ".join(path or "''" for path in self.paths[:10]) + (", … (see .paths)" if len(self) > 10 else "")
        return f"the {len(self)} layers with parameters that differ most ({count:,} parameters): {shown}"


def _alive(model: nn.Module | None) -> nn.Module:
    if model is None:
        raise ReferenceError("the model that was compared is gone, and with it its parameters; keep it to fine-tune it")
    return model
