"""Patching: values from elsewhere, or from another run, in the place of those that are there."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchhook.core.edit import At, Edit, in_arguments
from torchhook.core.errors import NotRecordedError, TapError
from torchhook.core.site import Site
from torchhook.core.trees import Address, Arguments, leaves
from torchhook.edits.basic import partly, spread

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
        value = of_call(self.values, call, isinstance(self.source, Tensor))
        return partly(x, spread(value, x, "patch"), self.where)


def patch(source: Source, where: Any = None, at: At = None) -> Edit:
    """The value of `source`: a tensor, or a capture, of which it takes the same site and call.

    `where` patches a part: a mask, or an index such as ``(slice(None), 3)`` for the fourth position.

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


def captured(source: Mapping[str, Any], site: Site, at: Address | None) -> list[Tensor]:
    """What the newest pass in `source` has of `site`, call by call, of each the tensor that `at` says."""
    if site.port not in ("output", "input", "grad_output"):
        raise TapError(f"a capture has no {site.port}; patch the output or the input of {site.path!r}")
    options = {"input": ", inputs=True", "grad_output": ", grads=True"}.get(site.port, "")
    try:
        values = source[site.path].newest(site.port)
    except NotRecordedError as error:
        raise TapError(
            f"the source has no {site}, where this edit acts; take it from capture(model, {site.path!r}{options})"
        ) from error
    return [_tensor(value, site, at) for value in values]


def of_call(values: list[Tensor], call: int, for_all: bool) -> Tensor:
    """The value of the `call`-th call."""
    if for_all:
        return values[0]
    if call >= len(values):
        raise TapError(f"the source has {len(values)} calls of this site, and this is call {call}")
    return values[call]


def _tensor(value: Any, site: Site, at: Address | None) -> Tensor:
    found: dict[Address | None, Tensor] = dict(leaves(value))
    address = in_arguments(at) if at is not None and isinstance(value, Arguments) else at
    if address is None and len(found) == 1:
        return next(iter(found.values()))
    if address in found:
        return found[address]
    raise TapError(f"the source has {len(found)} tensors at the {site}; say which of them with at=")
