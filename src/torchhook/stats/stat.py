"""What a statistic is: how to begin, what a tensor adds, how parts make a whole, and what it says in the end.

A `Stat` holds no data. Its state is one float64 tensor on the device of what it describes, so that many states lie
side by side, travel in one copy, and merge over batches, threads, ranks and machines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchhook.core.shards import local
from torchhook.core.snapshot import meaningful


class Stat(ABC):
    """A statistic of values that come one tensor at a time.

    One of your own needs a name, `update` and `compute`; the state is then `width` zeros to begin with, and states are
    added to merge them:

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

    `update` is given the tensor that flows, which it must not write to. It must not wait for the device either: no
    ``item()``, no ``if`` on a tensor, no ``torch.tensor`` of a number.
    """

    name: ClassVar[str]
    width: int = 1
    additive: bool = True  # whether states are added to merge them; set it to False where you override `merge`

    @property
    def key(self) -> str:
        """What the state is of: statistics with the same one share it."""
        return self.name

    def bound(self, module: nn.Module | None) -> Stat:
        """This statistic for what `module` gives (None: for parameters)."""
        return self

    def empty(self, x: Tensor) -> Tensor:
        """The state that has seen nothing, for values like `x`."""
        return torch.zeros(self.width, dtype=torch.float64, device=x.device)

    @abstractmethod
    def update(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to `state`, in place."""

    @abstractmethod
    def compute(self, state: Tensor) -> Any:
        """What `state`, on the CPU now, says."""

    def merge(self, states: Tensor) -> Tensor:
        """One state of all, from several in the first dimension; there may be others before those of the state."""
        return states.sum(0)

    def settle(self, states: Tensor) -> Tensor:
        """The `states` of several sites, as one each: kernels may keep several, side by side."""
        return states

    def of(self, *tensors: Tensor) -> Any:
        """What there is to say of some tensors.

        >>> from torchhook import Moments
        >>> Moments().of(torch.tensor([1.0, 2.0]), torch.tensor([6.0])).mean
        3.0
        """
        state = self.empty(counted(tensors[0]))
        for x in tensors:
            self.update(state, counted(x))
        return self.compute(self.settle(state[None])[0].cpu())

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if name[0] != "_")
        return f"{type(self).__name__}({settings})"


class UnlikeError(ValueError):
    """What came cannot be added to what was there: of that place there is no such statistic, and nobody is to blame."""


def unlike(reason: str) -> str:
    """What an `UnlikeError` said, by why a statistic is missing; empty if that is for another error.

    >>> unlike("UnlikeError: there were 8 units"), unlike("ZeroDivisionError: division by zero")
    ('there were 8 units', '')
    """
    kind, _, said = reason.partition(": ")
    return said if kind == UnlikeError.__name__ else ""


def counted(x: Tensor) -> Tensor:
    """`x` as plain numbers without a graph.

    Of a sharded tensor it is what is here, of a sparse one all, zeros too; complex numbers are two each, the imaginary
    parts after the real ones.
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
