"""What a statistic is: an empty state, how a tensor updates it, how states merge, and what is computed from one.

A `Stat` holds no data. Its state is one float64 tensor on the device of the values, so that many states can be stored
side by side, copied at once, and merged over batches, threads, ranks and machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchhook.core.shards import local
from torchhook.core.shown import short
from torchhook.core.snapshot import meaningful


class Stat(ABC):
    """A statistic of values that come one tensor at a time.

    A statistic of your own needs a name, `update` and `compute`. Its state is `width` zeros at first, and states are
    merged by adding them:

    >>> class NearZero(Stat):
    ...     name, width = "near_zero", 2
    ...
    ...     def update(self, state, x):
    ...         near = (x.abs() < 1e-3).sum()
    ...         state += torch.stack([near, near.new_full((), x.numel())])
    ...
    ...     def compute(self, state):
    ...         return float(state[0] / state[1])
    >>> NearZero().of(torch.tensor([0.0, 1e-6, 1.0, 2.0]))
    0.5

    `update` gets the tensor that flows, and must not write to it. It must not wait for the device either: no
    ``item()``, no ``if`` on a tensor, no ``torch.tensor`` of a number.
    """

    name: ClassVar[str]
    width: int = 1
    additive: bool = True  # whether states are merged by adding them; set it to False if you override `merge`

    @property
    def key(self) -> str:
        """The key of the state: statistics with the same key share one state."""
        return self.name

    def bound(self, module: nn.Module | None) -> Stat:
        """This statistic for the outputs of `module` (None: for parameters)."""
        return self

    def empty(self, x: Tensor) -> Tensor:
        """The state without any values, for values like `x`."""
        return torch.zeros(self.width, dtype=torch.float64, device=x.device)

    @abstractmethod
    def update(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to `state`, in place."""

    def together(self, state: Tensor, other: Stat, its: Tensor) -> Callable[[Tensor], bool] | None:
        """What updates this statistic's `state` and that of `other` in one read of the values, if anything does.

        It returns whether it has updated them. If not, neither has changed, and each is updated by itself.
        """
        return None

    @abstractmethod
    def compute(self, state: Tensor) -> Any:
        """The result, from a `state` that is on the CPU."""

    def merge(self, states: Tensor) -> Tensor:
        """Merge states along the first dimension into one. There may be further dimensions before those of a state."""
        return states.sum(0)

    def settle(self, states: Tensor) -> Tensor:
        """The `states` of several sites, one for each. (A kernel may keep several states per site, side by side.)"""
        return states

    def of(self, *tensors: Tensor) -> Any:
        """The statistic of some tensors.

        >>> from torchhook import Moments
        >>> Moments().of(torch.tensor([1.0, 2.0]), torch.tensor([6.0])).mean
        3.0
        """
        state = self.empty(counted(tensors[0]))
        for x in tensors:
            self.update(state, counted(x))
        return self.compute(self.settle(state[None])[0].cpu())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={short(value)}" for name, value in vars(self).items() if name[0] != "_")
        return f"{type(self).__name__}({settings})"


class UnlikeError(ValueError):
    """The values do not fit those before, so that this place cannot have the statistic. This is not a fault."""


def unlike(reason: str) -> str:
    """The message of an `UnlikeError`, from the reason why a statistic is missing; empty for any other error.

    >>> unlike("UnlikeError: there were 8 units"), unlike("ZeroDivisionError: division by zero")
    ('there were 8 units', '')
    """
    kind, _, said = reason.partition(": ")
    return said if kind == UnlikeError.__name__ else ""


def counted(x: Tensor) -> Tensor:
    """`x` as a plain tensor of real numbers without a graph.

    A sharded tensor becomes its local part, a sparse one dense. Complex numbers become two numbers each, all real parts
    before the imaginary ones.
    """
    x = local(meaningful(x).detach())
    if x.is_quantized:
        x = x.dequantize()
    if x.is_nested:
        x = torch.cat([part.reshape(-1) for part in x.unbind()])
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_complex():
        x = torch.cat([x.real, x.imag]) if x.dim() else torch.stack([x.real, x.imag])
    return x.resolve_neg()
