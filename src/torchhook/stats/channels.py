"""What each unit does: the channels of a convolution, the features of a linear layer."""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchhook.stats.stat import Stat

_SECOND = (
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
        self._told: int | None = None  # the dimension, by the module

    def bound(self, module: nn.Module | None) -> Stat:
        twin = copy.copy(self)
        twin._told = _dimension(module)
        return twin

    def by_unit(self, x: Tensor, units: int | None = None) -> Tensor:
        """The values in `x` as a matrix with a row for each unit, of which there are `units` if that is known."""
        if x.dim() < 2:
            matrix = x.reshape(-1, 1)
        else:
            guess = -1 if x.dim() == 3 else 1
            dim = self.dim if self.dim is not None else self._told if self._told is not None else guess
            matrix = x.movedim(dim, 0).flatten(1)
        if units is not None and len(matrix) != units:
            raise ValueError(
                f"there were {units} units, and now there are {len(matrix)}; if another dimension has them, pass"
                f" {type(self).__name__}(dim=...) in stats="
            )
        return matrix


def _dimension(module: nn.Module | None) -> int | None:
    """Where the units are in what `module` gives, or in a parameter; None if that is not known."""
    if module is None:
        return 0
    if isinstance(module, nn.modules.conv._ConvNd):
        return -1 - len(module.kernel_size)  # with a batch or without
    return 1 if isinstance(module, _SECOND) else -1 if isinstance(module, _LAST) else None


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
        x = self.by_unit(x, state.shape[-1])
        x = x if x.dtype == torch.float64 else x.float()
        finite = x.isfinite()
        known = x.where(finite, 0)
        n = finite.sum(1)
        some, wide = n.clamp(min=1), torch.float64  # sums of large numbers are too large for what they are sums of
        mean = (known.sum(1, dtype=wide) / some).to(x.dtype)
        d = (x - mean[:, None]).where(finite, 0)
        left = d.sum(1, dtype=wide) / some
        m2 = torch.linalg.vector_norm(d, dim=1, dtype=wide).square() - n * left.square()
        size = torch.linalg.vector_norm(known, 1, dim=1, dtype=wide)
        new = torch.stack([n.double(), mean.double() + left, m2.clamp(min=0), size, (known > 0).sum(1).double()])
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
