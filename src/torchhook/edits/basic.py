"""Edits that need only the value itself: zero, replace, add, scale, clamp, noise, apply."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.edit import At, Edit
from torchhook.core.errors import TapError
from torchhook.core.shown import maker
from torchhook.core.site import Site


class Zero(Edit):
    """Replace the value by zeros. `zero` is an edit itself; ``zero(at=0)`` picks a tensor of a nested value.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.zero}):
    ...     model(torch.ones(2))
    tensor([0., 0.])
    """

    def __call__(self, at: At = None) -> Zero:
        return Zero(at)

    def change(self, x: Tensor, call: int) -> Tensor:
        return torch.zeros_like(x)


zero = Zero()


class WithOperand(Edit):
    """An edit with a number or a tensor, which is moved to the module's device once, not at every call."""

    def __init__(self, operand: Tensor | float, where: Any = None, at: At = None) -> None:
        super().__init__(at)
        self.operand = operand
        self.where = where

    def bound(self, site: Site, module: nn.Module) -> Edit:
        device = next((p.device for p in module.parameters()), None)
        if device is None or not isinstance(self.operand, Tensor):
            return self
        twin = copy.copy(self)
        twin.operand = self.operand.to(device)
        return twin

    def like(self, x: Tensor) -> Any:
        """The operand in the dtype and on the device of `x`."""
        return self.operand.to(x) if isinstance(self.operand, Tensor) else self.operand


class Replace(WithOperand):
    """Replaces the value."""

    def change(self, x: Tensor, call: int) -> Tensor:
        if isinstance(self.operand, Tensor):
            return partly(x, fitted(self.operand, x, "replace"), self.where)
        return partly(x, x.new_full(x.shape, self.operand), self.where)


class Add(WithOperand):
    """Adds to the value."""

    def change(self, x: Tensor, call: int) -> Tensor:
        return partly(x, x + self.like(x), self.where)


class Scale(WithOperand):
    """Multiplies the value."""

    def change(self, x: Tensor, call: int) -> Tensor:
        return partly(x, x * self.like(x), self.where)


class Clamp(Edit):
    """Limits the value to a range."""

    def __init__(self, low: float | None, high: float | None, at: At = None) -> None:
        super().__init__(at)
        self.low = low
        self.high = high

    def change(self, x: Tensor, call: int) -> Tensor:
        return x.clamp(self.low, self.high)


class Noise(Edit):
    """Adds noise. With a seed, it depends on seed and path only, so that a checkpoint recomputes the same noise."""

    def __init__(self, std: float, seed: int | None, at: At = None) -> None:
        super().__init__(at)
        self.std = std
        self.seed = seed

    def bound(self, site: Site, module: nn.Module) -> Noise:
        twin = copy.copy(self)
        if self.seed is not None:
            twin.seed = (self.seed * 1_000_003 + sum(map(ord, site.path)) * 7_919) % 2**31
        return twin

    def change(self, x: Tensor, call: int) -> Tensor:
        if self.seed is None:
            return x + torch.randn_like(x) * self.std
        drawn: Tensor = torch.ops.torchhook.noise(x.detach(), self.seed)
        return x + drawn * self.std


class Apply(Edit):
    """Applies a function."""

    def __init__(self, function: Callable[[Any], Any], at: At = None) -> None:
        super().__init__(at)
        self.function = function
        self.whole = at is None

    def change(self, x: Any, call: int) -> Any:
        return self.function(x)


@maker
def replace(value: Tensor | float, where: Any = None, at: At = None) -> Edit:
    """Replace the value by `value`, broadcast to its shape; `where` limits it to a mask or an index.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.replace(7.0)}):
    ...     model(torch.ones(2))
    tensor([7., 7.])
    """
    return Replace(value, where, at)


@maker
def add(vector: Tensor | float, where: Any = None, at: At = None) -> Edit:
    """Add `vector` (steering); `where` limits it to a mask or an index, as ``(slice(None), -1)``: the last position.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.add(torch.tensor([0.0, 1.0]))}):
    ...     model(torch.ones(1, 2))
    tensor([[1., 2.]])
    """
    return Add(vector, where, at)


@maker
def scale(factor: Tensor | float, where: Any = None, at: At = None) -> Edit:
    """Multiply the value by `factor`; `where` limits it to a mask or an index.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.scale(3.0)}):
    ...     model(torch.ones(2))
    tensor([3., 3.])
    """
    return Scale(factor, where, at)


@maker
def clamp(min: float | None = None, max: float | None = None, at: At = None) -> Edit:  # noqa: A002 (torch's names)
    """Limit the value to the range from `min` to `max`.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.clamp(max=0.5)}):
    ...     model(torch.tensor([0.2, 0.9]))
    tensor([0.2000, 0.5000])
    """
    if min is None and max is None:
        raise ValueError("clamp needs min, max or both")
    return Clamp(min, max, at)


@maker
def noise(std: float, seed: int | None = None, at: At = None) -> Edit:
    """Add Gaussian noise: new at every call, or, with a `seed`, always the same for a given site and shape.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.noise(0.1, seed=0)}):
    ...     torch.equal(model(torch.ones(2)), model(torch.ones(2)))
    True
    """
    return Noise(std, seed, at)


@maker
def apply(function: Callable[[Any], Any], at: At = None) -> Edit:
    """Replace the value by `function` of it, or one tensor of it if `at` is given.

    `torchhook.edit` also accepts the bare function; a `Tap` would treat that as an observer.

    >>> from torchhook import Session, Tap, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with Session(model, [Tap("0", edits.apply(torch.neg))]):
    ...     model(torch.ones(2))
    tensor([-1., -1.])
    """
    if not callable(function):
        raise TypeError(f"function must be callable, not {function!r}")
    return Apply(function, at)


def partly(x: Tensor, new: Tensor, where: Any) -> Tensor:
    """`new` at the mask or index `where`, and `x` elsewhere; all of `new` if `where` is None."""
    if where is None:
        return new
    if isinstance(where, Tensor) and where.dtype == torch.bool:
        return torch.where(where.to(x.device), new, x)
    changed = x.clone()
    changed[where] = new[where]
    return changed


def fitted(value: Tensor, x: Tensor, what: str) -> Tensor:
    """A copy of `value` in the shape and dtype and on the device of `x`; the next operation may work in place."""
    try:
        return value.to(x).expand_as(x).clone()
    except RuntimeError as error:
        raise TapError(
            f"{what} has a value of shape {tuple(value.shape)}, which does not fit {tuple(x.shape)}"
        ) from error
