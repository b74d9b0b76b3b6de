"""`Covariance`: how units vary together, for the rank of a representation and for comparing two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchhook.core.errors import BudgetError
from torchhook.stats.channels import ByUnit


@dataclass(frozen=True)
class Spread:
    """What `Covariance` computes: the number of samples, their mean, and the covariance of the units (unbiased)."""

    count: int
    mean: Tensor
    covariance: Tensor

    @property
    def effective_rank(self) -> float:
        """The exponential of the entropy of the spectrum: the number of directions, weighted by their variance."""
        share = torch.linalg.eigvalsh(self.covariance).clamp(min=0)
        share = share / share.sum()
        return float(torch.special.entr(share).sum().exp())


class Covariance(ByUnit):
    """The covariance matrix of the units; all other dimensions are samples.

    Samples with a value that is not finite are left out. States are sums in float64, with an error of about
    (mean / deviation)² times its precision. A state has `units`² numbers, so layers wider than `max_units` are refused.

    >>> spread = Covariance(dim=1).of(torch.tensor([[0.0, 0.0], [2.0, 4.0]]))
    >>> spread.covariance.tolist(), round(spread.effective_rank, 3)
    ([[2.0, 4.0], [4.0, 8.0]], 1.0)
    """

    name = "covariance"

    def __init__(self, dim: int | None = None, max_units: int = 4096) -> None:
        super().__init__(dim)
        self.max_units = max_units

    def empty(self, x: Tensor) -> Tensor:
        units = self.by_unit(x).shape[0]
        if units > self.max_units:
            raise BudgetError(
                f"a covariance of {units} units would take {units * units * 8 / 2**30:.1f} GiB; select sites with"
                f" fewer, or pass Covariance(max_units={units}) in stats="
            )
        return torch.zeros(units + 1, units + 1, dtype=torch.float64, device=x.device)

    def update(self, state: Tensor, x: Tensor) -> None:
        x = self.by_unit(x, len(state) - 1).double()  # torch may be set to multiply float32 at lower precision
        finite = x.isfinite().all(0)
        n = finite.sum()
        mean = x.where(finite, 0).sum(1) / n.clamp(min=1)
        d = (x - mean[:, None]).where(finite, 0)
        total, left = d.sum(1) + n * mean, d.sum(1)
        state[0, 0] += n
        state[0, 1:] += total
        state[1:, 0] += total
        state[1:, 1:] += d @ d.T + torch.outer(mean, left) + torch.outer(left, mean) + n * torch.outer(mean, mean)

    def compute(self, state: Tensor) -> Spread:
        n, total = state[0, 0], state[0, 1:]
        mean = total / n
        covariance = (state[1:, 1:] - torch.outer(total, mean)) / (n - 1)
        return Spread(int(n), mean, covariance)
