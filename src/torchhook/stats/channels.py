"""`Channels`: statistics of each unit, such as the channels of a convolution or the features of a linear layer."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.torch_internals import BATCH_AND_INSTANCE_NORMS, CONVOLUTIONS, POOLINGS
from torchhook.stats.kernels import kernels
from torchhook.stats.kernels.plain import merged_channels
from torchhook.stats.stat import Stat, UnlikeError

_SECOND = (
    BATCH_AND_INSTANCE_NORMS,
    nn.GroupNorm,
    *POOLINGS,
)
_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)


class Units(NamedTuple):
    """What `Channels` computes from the finite values: tensors with one number per unit."""

    mean: Tensor
    std: Tensor
    abs_mean: Tensor
    active_fraction: Tensor


class ByUnit(Stat):
    """A statistic of units, which are in dimension `dim`.

    Without `dim`, outputs of convolutions, batch norms and poolings have their units in the second dimension, those of
    linear layers, layer norms and attention in the last. Other values have them in the last of three dimensions, else
    in the second. Parameters have them in the first.
    """

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim
        self._known: int | None = None  # the dimension, known from the module

    def bound(self, module: nn.Module | None) -> Stat:
        twin = copy.copy(self)
        twin._known = _dimension(module)
        return twin

    def placed(self, x: Tensor, units: int | None = None) -> tuple[Tensor, int]:
        """`x` with at least two dimensions, and the dimension of its units, which must be `units` many if given."""
        if x.dim() < 2:
            x, dim = x.reshape(-1, 1), 0
        else:
            guess = -1 if x.dim() == 3 else 1
            dim = self.dim if self.dim is not None else self._known if self._known is not None else guess
        if units is not None and x.size(dim) != units:
            raise UnlikeError(
                f"there were {units} units, and now there are {x.size(dim)}; if layers share the module, give each its"
                f" own; if the units are in another dimension, pass {type(self).__name__}(dim=...) in stats= of measure"
            )
        return x, dim

    def by_unit(self, x: Tensor, units: int | None = None) -> Tensor:
        """The values in `x` as a matrix with one row per unit, of which there must be `units` if given."""
        x, dim = self.placed(x, units)
        return x.movedim(dim, 0).flatten(1)


def _dimension(module: nn.Module | None) -> int | None:
    """The dimension of the units in the output of `module`, or in a parameter; None if that is not known."""
    if module is None:
        return 0
    if isinstance(module, CONVOLUTIONS):
        return -1 - len(module.kernel_size)  # with a batch or without
    return 1 if isinstance(module, _SECOND) else -1 if isinstance(module, _LAST) else None


class Channels(ByUnit):
    """Mean, standard deviation, mean absolute value and active fraction (of values above zero) of each unit.

    `ByUnit` says which dimension the units are in.

    >>> units = Channels(dim=1).of(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    >>> units.mean.tolist(), units.active_fraction.tolist()
    ([0.0, 2.0], [0.0, 1.0])
    """

    name = "channels"
    additive = False

    def empty(self, x: Tensor) -> Tensor:
        x, dim = self.placed(x)
        return torch.zeros(5, x.size(dim), dtype=torch.float64, device=x.device)

    def update(self, state: Tensor, x: Tensor) -> None:
        kernels(x.device).channels(state, *self.placed(x, state.shape[-1]))

    def merge(self, states: Tensor) -> Tensor:
        return merged_channels(states)

    def compute(self, state: Tensor) -> Units:
        n, mean, m2, size, active = state
        none = n == 0
        return Units(
            mean.masked_fill(none, torch.nan),
            (m2 / (n - 1)).sqrt().masked_fill(n < 2, torch.nan),
            size / n,
            active / n,
        )
