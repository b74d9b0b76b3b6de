"""Edits that need nothing but the value itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.edit import At, Edit
from torchhook.core.errors import TapError
from torchhook.core.site import Site


class Zero(Edit):
    """All zeros. `zero` is one already; ``zero(at=0)`` says where.

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
    """An edit with a number or a tensor, which is brought to the module's device once, not at every call."""

    def __init__(self, operand: Tensor | float, where: Any = None, at: At = None) -> None:
        super().__init__(at)
        self.operand = operand
        self.where = where

    def bound(self, site: Site, module: nn.Module) -> Edit:
        where = next((p.device for p in module.parameters()), None)
        if where is None or not isinstance(self.operand, Tensor):
            return self
        twin = copy.copy(self)
        twin.operand = self.operand.to(where)
        return twin

    def like(self, x: Tensor) -> Any:
        """The operand as it can be combined with `x`."""
        return self.operand.to(x) if isinstance(self.operand, Tensor) else self.operand


class Replace(WithOperand):
    """Something else."""

    def change(self, x: Tensor, call: int) -> Tensor:
        if isinstance(self.operand, Tensor):
            return partly(x, spread(self.operand, x, "replace"), self.where)
        return partly(x, x.new_full(x.shape, self.operand), self.where)


class Add(WithOperand):
    """A vector on top."""

    def change(self, x: Tensor, call: int) -> Tensor:
        return partly(x, x + self.like(x), self.where)


class Scale(WithOperand):
    """More, or less."""

    def change(self, x: Tensor, call: int) -> Tensor:
        return partly(x, x * self.like(x), self.where)


class Clamp(Edit):
    """Within bounds."""

    def __init__(self, low: float | None, high: float | None, at: At = None) -> None:
        super().__init__(at)
        self.low = low
        self.high = high

    def change(self, x: Tensor, call: int) -> Tensor:
        return x.clamp(self.low, self.high)


class Noise(Edit):
    """Noise on top. With a seed, a function of seed and path: a checkpoint that computes again has the same."""

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
    """A function of one's own."""

    def __init__(self, function: Callable[[Any], Any], at: At = None) -> None:
        super().__init__(at)
        self.function = function
        self.whole = at is None

    def change(self, x: Any, call: int) -> Any:
        return self.function(x)

    def __repr__(self) -> str:
        return f"edit by {getattr(self.function, '__qualname__', type(self.function).__name__)}"


def replace(value: Tensor | float, where: Any = None, at: At = None) -> Edit:
    """`value`, spread over the shape of what is there, or only `where` a mask or an index says.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.replace(7.0)}):
    ...     model(torch.ones(2))
    tensor([7., 7.])
    """
    return Replace(value, where, at)


def add(vector: Tensor | float, where: Any = None, at: At = None) -> Edit:
    """What is there plus `vector`: steering. `where` may say where alone: ``(slice(None), -1)``, the last position.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.add(torch.tensor([0.0, 1.0]))}):
    ...     model(torch.ones(1, 2))
    tensor([[1., 2.]])
    """
    return Add(vector, where, at)


def scale(factor: Tensor | float, where: Any = None, at: At = None) -> Edit:
    """What is there times `factor`, or only `where` a mask or an index says.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.scale(3.0)}):
    ...     model(torch.ones(2))
    tensor([3., 3.])
    """
    return Scale(factor, where, at)


def clamp(min: float | None = None, max: float | None = None, at: At = None) -> Edit:  # noqa: A002 (torch's names)
    """What is there, but no less than `min` and no more than `max`.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.clamp(max=0.5)}):
    ...     model(torch.tensor([0.2, 0.9]))
    tensor([0.2000, 0.5000])
    """
    if min is None and max is None:
        raise ValueError("clamp needs min, max or both")
    return Clamp(min, max, at)


def noise(std: float, seed: int | None = None, at: At = None) -> Edit:
    """What is there plus Gaussian noise: new at every call, or, with a `seed`, the same for a place and shape.

    >>> from torchhook import edit, edits
    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit(model, {"0": edits.noise(0.1, seed=0)}):
    ...     torch.equal(model(torch.ones(2)), model(torch.ones(2)))
    True
    """
    return Noise(std, seed, at)


def apply(function: Callable[[Any], Any], at: At = None) -> Edit:
    """What `function` makes of the whole value there, or of the tensor that `at` says.

    In `torchhook.edit` the bare function will do; a `Tap` takes it for an observer.

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
    """`new` where `where` says, a mask or an index, and `x` elsewhere; all of `new` if it is None."""
    if where is None:
        return new
    if isinstance(where, Tensor) and where.dtype == torch.bool:
        return torch.where(where.to(x.device), new, x)
    changed = x.clone()
    changed[where] = new[where]
    return changed


def spread(value: Tensor, x: Tensor, what: str) -> Tensor:
    """`value` in the shape, dtype and place of `x`; a copy, since what comes next may work in place."""
    try:
        return value.to(x).expand_as(x).clone()
    except RuntimeError as error:
        raise TapError(
            f"{what} has a value of shape {tuple(value.shape)}, which does not fit {tuple(x.shape)}"
        ) from error
