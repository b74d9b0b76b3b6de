"""Tensors that are trained without a module: a module that stands for them, and their names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

from torch import Tensor, nn

_FRAMES = 30  # callers among whose variables we look for names
_MANY = 1000  # elements of a list that we look at for names


class Tensors(nn.Module):
    """Stands for tensors that are trained without a module: its parameters are these tensors themselves.

    >>> import torch
    >>> weight = torch.zeros(2, requires_grad=True)
    >>> next(Tensors({"weight": weight}).parameters()) is weight
    True
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._named = dict(named)  # a module takes no plain tensors as its parameters

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._named.items():
            yield f"{prefix}.{name}" if prefix else name, tensor


def named(tensors: Iterable[Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of the script's variables that hold them, else by number: ``param0``, ``param1``, …

    Only variables of modules are looked at before Python 3.13: reading those of a function would change what its
    ``locals()`` returned, and keep them alive.
    """
    names = _variables()
    found: dict[str, Tensor] = {}
    for number, tensor in enumerate(tensors):
        name = names.get(id(tensor), f"param{number}")
        found[name if name not in found else f"param{number}"] = tensor
    return found


def _variables() -> dict[int, str]:
    """The names of the tensors in the variables of our callers, by id; what is nearest to us counts."""
    found: dict[int, str] = {}
    frame: FrameType | None = sys._getframe(1)
    seen = set()
    for _ in range(_FRAMES):
        if frame is None:
            break
        if not str(frame.f_globals.get("__name__")).startswith(("torch.", "torchhook.")):
            spaces = [frame.f_locals] if sys.version_info >= (3, 13) else []
            if id(frame.f_globals) not in seen:
                seen.add(id(frame.f_globals))
                spaces.append(frame.f_globals)
            for space in spaces:
                for name, value in list(space.items()):
                    for tensor, label in _labelled(name, value):
                        found.setdefault(id(tensor), label)
        frame = frame.f_back
    return found


def _labelled(name: str, value: Any) -> Iterator[tuple[Tensor, str]]:
    """The tensors in a variable, each with a label."""
    if isinstance(value, Tensor):
        yield value, name
    elif type(value) in (list, tuple, dict) and len(value) <= _MANY:
        for key, part in value.items() if type(value) is dict else enumerate(value):
            if isinstance(part, Tensor):
                yield part, f"{name}[{key}]"
