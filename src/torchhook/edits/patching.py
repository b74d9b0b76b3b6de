"""Patching: values from elsewhere, or from another run, in the place of those that are there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.edit import At, Edit
from torchhook.core.site import Site
from torchhook.core.trees import Arguments, leaves, taken
from torchhook.edits.basic import spread
from torchhook.errors import TapError

Source = Tensor | Mapping[str, Any]


class Patch(Edit):
    """Values from `source` where `where` says."""

    def __init__(self, source: Source, where: Any, at: At = None) -> None:
        super().__init__(at)
        self.source = source
        self.where = where
        self.values: list[Tensor] = [source] if isinstance(source, Tensor) else []

    def bound(self, site: Site, module: nn.Module) -> Patch:
        if isinstance(self.source, Tensor):
            return self
        twin = copy.copy(self)
        twin.values = captured(self.source, site, self.at)
        twin.by_call = len(twin.values) > 1
        return twin

    def change(self, x: Tensor, call: int) -> Tensor:
        value = spread(of_call(self.values, call, isinstance(self.source, Tensor)), x, "patch")
        if self.where is None:
            return value
        if isinstance(self.where, Tensor) and self.where.dtype == torch.bool:
            return torch.where(self.where.to(x.device), value, x)
        changed = x.clone()
        changed[self.where] = value[self.where]
        return changed


def patch(source: Source, where: Any = None, at: At = None) -> Edit:
    """The value of `source`: a tensor, or a capture, of which it takes the same site and call.

    `where` patches a part: a mask, or an index such as ``(slice(None), 3)`` for the fourth position.

    >>> from torchhook import capture, edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with capture(model, "0") as clean:
    ...     _ = model(torch.ones(3))
    >>> with edit(model, {"0": edits.patch(clean, where=torch.tensor([True, False, False]))}):
    ...     model(torch.zeros(3))
    tensor([1., 0., 0.])
    """
    if not isinstance(source, (Tensor, Mapping)):
        raise TypeError(f"source must be a tensor or a capture, not {source!r:.80}")
    return Patch(source, where, at)


def captured(source: Mapping[str, Any], site: Site, at: tuple[Any, ...] | None) -> list[Tensor]:
    """What `source` has of `site`, call by call, of each the tensor that `at` says."""
    calls = source[site.path]
    read = {"output": "outputs", "input": "inputs", "grad_output": "grads"}.get(site.port)
    if read is None:
        raise TapError(f"a capture has no {site.port}; patch the output or the input of {site.path!r}")
    return [_tensor(value, site, at) for value in getattr(calls, read)]


def of_call(values: list[Tensor], call: int, for_all: bool) -> Tensor:
    """The value of the `call`-th call."""
    if for_all:
        return values[0]
    if call >= len(values):
        raise TapError(f"the source has {len(values)} calls of this site, and this is call {call}")
    return values[call]


def _tensor(value: Any, site: Site, at: tuple[Any, ...] | None) -> Tensor:
    found = dict(leaves(value))
    if at is None and len(found) == 1:
        return next(iter(found.values()))  # type: ignore[no-any-return]
    if at in found:
        return taken(value, at)  # type: ignore[no-any-return]
    inside = value.unwrapped() if isinstance(value, Arguments) else value
    raise TapError(f"the source has a {type(inside).__name__} at the {site}; say which tensor of it with at=")
