"""Patching: replace values by a tensor, or by those of another run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchhook.core.edit import At, Edit, in_arguments
from torchhook.core.errors import NotRecordedError, TapError
from torchhook.core.shown import maker
from torchhook.core.site import Site
from torchhook.core.trees import Address, Arguments, leaves
from torchhook.edits.basic import fitted, partly

Source = Tensor | Mapping[str, Any]


class Patch(Edit):
    """Replaces the value by that of `source`, at the positions `where`."""

    def __init__(self, source: Source, where: Any, at: At = None) -> None:
        super().__init__(at)
        self.source = source
        self.where = where
        self.values: list[Tensor] = [source] if isinstance(source, Tensor) else []

    def bound(self, site: Site, module: nn.Module) -> Patch:
        if isinstance(self.source, Tensor):
            return self
        twin = copy.copy(self)
        twin.values = captured_values(self.source, site, self.at)
        twin.by_call = len(twin.values) > 1
        return twin

    def change(self, x: Tensor, call: int) -> Tensor:
        value = of_call(self.values, call, isinstance(self.source, Tensor))
        return partly(x, fitted(value, x, "patch"), self.where)


@maker
def patch(source: Source, where: Any = None, at: At = None) -> Edit:
    """Replace the value by `source`: a tensor, or a capture, from which it takes the same site and call.

    `where` limits the patch to a mask or an index, such as ``(slice(None), 3)`` for the fourth position.

    >>> import torch
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


def captured_values(source: Mapping[str, Any], site: Site, at: Address | None) -> list[Tensor]:
    """The values of `site` in the newest pass of `source`, one per call; `at` says which tensor of a nested value."""
    if site.port not in ("output", "input", "grad_output"):
        raise TapError(f"a capture does not have the {site.port}; patch the output or the input of {site.path!r}")
    options = {"input": ", inputs=True", "grad_output": ", grads=True"}.get(site.port, "")
    try:
        values = source[site.path].newest(site.port)
    except NotRecordedError as error:
        raise TapError(
            f"the source does not have the {site}, which this edit needs; make it with"
            f" capture(model, {site.path!r}{options})"
        ) from error
    return [_tensor(value, site, at) for value in values]


def of_call(values: list[Tensor], call: int, for_all: bool) -> Tensor:
    """The value of the `call`-th call."""
    if for_all:
        return values[0]
    if call >= len(values):
        raise TapError(f"the source has {len(values)} calls of this site, but this is call {call} (counted from 0)")
    return values[call]


def _tensor(value: Any, site: Site, at: Address | None) -> Tensor:
    found: dict[Address | None, Tensor] = dict(leaves(value))
    address = in_arguments(at) if at is not None and isinstance(value, Arguments) else at
    if address is None and len(found) == 1:
        return next(iter(found.values()))
    if address in found:
        return found[address]
    raise TapError(f"the source has {len(found)} tensors at the {site}; choose one with at=")
