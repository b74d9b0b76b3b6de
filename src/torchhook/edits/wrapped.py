"""Edits around another edit, which limit it: to some samples of a batch, or to one position of a sequence."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.edit import Edit
from torchhook.core.site import Port, Site
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves, mapped
from torchhook.edits.basic import partly


class Wrapped(Edit):
    """An edit that acts where another one does."""

    def __init__(self, edit: Edit) -> None:
        super().__init__(edit.at)
        self.edit = edit
        self.whole = edit.whole

    def moved(self, path: str, module: nn.Module, port: Port, model: nn.Module) -> tuple[str, nn.Module, Port]:
        return self.edit.moved(path, module, port, model)

    def bound(self, site: Site, module: nn.Module) -> Edit:
        twin = copy.copy(self)
        twin.edit = self.edit.bound(site, module)
        twin.by_call = twin.edit.by_call
        return twin


class MixedSamplesError(Exception):
    """A value cannot be divided among the sites."""


class ShareEdit(Wrapped):
    """An edit of one share of the batch."""

    def __init__(self, edit: Edit, number: int, size: int, total: int) -> None:
        super().__init__(edit)
        self.number = number
        self.size = size
        self.total = total

    def change(self, x: Any, call: int) -> Any:
        if any(not is_batched(tensor, self.total) for _, tensor in leaves(x)):
            raise MixedSamplesError
        first, last = self.number * self.size, (self.number + 1) * self.size
        if not self.whole:
            return torch.cat([x[:first], self.edit.change(x[first:last], call), x[last:]])
        new = self.edit.change(mapped(lambda tensor: tensor[first:last], x), call)
        news = iter([tensor for _, tensor in leaves(new)])
        return mapped(lambda t: torch.cat([t[:first], next(news), t[last:]]), x)


class PositionEdit(Wrapped):
    """An edit of one position of samples × positions × features."""

    def __init__(self, edit: Edit, position: int) -> None:
        super().__init__(edit)
        self.position = position

    def change(self, x: Any, call: int) -> Any:
        if self.position >= x.shape[1]:  # a later call may be shorter
            return x
        return partly(x, self.edit.change(x, call), (slice(None), self.position))


class Lengths(Wrapped):
    """Changes nothing, and counts the positions at the sites where an edit acts."""

    def __init__(self, edit: Edit, found: dict[Site, int], site: Site) -> None:
        super().__init__(edit)
        self.found = found
        self.site = site

    def change(self, x: Any, call: int) -> Any:
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise ValueError(
                f"positions=True needs values of samples × positions × features, but the {self.site} is"
                f" {shape_of(x)}; leave it out of sites, or choose a tensor of it with the edit's at="
            )
        self.found[self.site] = max(self.found.get(self.site, 0), x.shape[1])
        return x


def is_batched(tensor: Tensor, size: int) -> bool:
    """Whether the first dimension of `tensor` has this size."""
    return tensor.dim() > 0 and tensor.shape[0] == size
