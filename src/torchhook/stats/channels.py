"""What each unit does: the channels of a convolution, the features of a linear layer."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchhook.stats.stat import Stat

# What these give has its units in the second dimension, at any number of dimensions.
_SECOND = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)
_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.MultiheadAttention, nn.RNNBase)


class Units(NamedTuple):
    """What `Channels` say, a tensor with a number a unit each; of the finite values."""

    mean: Tensor
    std: Tensor
    abs_mean: Tensor
    active_fraction: Tensor


class ByUnit(Stat):
    """A statistic of units, which are in dimension `dim`.

    Without it, what convolutions, batch norms and poolings give has them in the second dimension, what linear layers,
    layer norms and attention give in the last; of other values they are in the last if there are three dimensions, else
    in the second. Parameters have them in the first.
    """

    def __init__(self, dim: int | None = None) -> None:
        self.dim = dim
        self._second_or_last: int | None = None  # told by the module

    def bound(self, module: nn.Module | None) -> Stat:
        if self.dim is not None:
            return self
        twin = copy.copy(self)
        twin.dim = 0 if module is None else None
        twin._second_or_last = 1 if isinstance(module, _SECOND) else -1 if isinstance(module, _LAST) else None
        return twin

    def by_unit(self, x: Tensor) -> Tensor:
        """The values in `x` as a matrix with a row for each unit."""
        if x.dim() < 2:
            return x.reshape(-1, 1)
        dim = self.dim
        if dim is None:
            dim = self._second_or_last or (-1 if x.dim() == 3 else 1)
        return x.movedim(dim, 0).flatten(1)


class Channels(ByUnit):
    """Mean, standard deviation, mean of absolutes and active fraction (values above zero) of each unit.

    Which dimension the units are in, `ByUnit` says.

    >>> units = Channels(dim=1).of(torch.tensor([[0.0, 1.0], [0.0, 3.0]]))
    >>> units.mean.tolist(), units.active_fraction.tolist()
    ([0.0, 2.0], [0.0, 1.0])
    """

    name = "channels"
    additive = False

    def empty(self, x: Tensor) -> Tensor:
        return torch.zeros(5, self.by_unit(x).shape[0], dtype=torch.float64, device=x.device)

    def update(self, state: Tensor, x: Tensor) -> None:
        x = self.by_unit(x)
        if len(x) != state.shape[-1]:
            raise ValueError(
                f"there were {state.shape[-1]} units, and now there are {len(x)}; if another dimension has the units,"
                " pass Channels(dim=...) in stats="
            )
        x = x if x.dtype == torch.float64 else x.float()
        finite = x.isfinite()
        known = x.where(finite, 0)
        n = finite.sum(1)
        mean = known.sum(1) / n.clamp(min=1)
        d = (x - mean[:, None]).where(finite, 0)
        left = d.sum(1) / n.clamp(min=1)
        m2 = (d - left[:, None]).where(finite, 0).square().sum(1)
        new = torch.stack([n.double(), mean.double() + left.double(), m2, known.abs().sum(1), (known > 0).sum(1)])
        state.copy_(self.merge(torch.stack([state, new])))

    def merge(self, states: Tensor) -> Tensor:
        n, mean, m2, size, active = states.unbind(-2)
        total = n.sum(0).clamp(min=1)
        centre = (n * mean).sum(0) / total
        middle = centre + (n * (mean - centre)).sum(0) / total
        m2 = m2 + n * (mean - middle).square()
        return torch.stack([n.sum(0), middle, m2.sum(0), size.sum(0), active.sum(0)], -2)

    def compute(self, state: Tensor) -> Units:
        n, mean, m2, size, active = state
        none = n == 0
        return Units(
            mean.masked_fill(none, torch.nan),
            (m2 / (n - 1)).sqrt().masked_fill(n < 2, torch.nan),
            size / n,
            active / n,
        )
