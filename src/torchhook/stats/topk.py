"""`TopK`: the largest values, and where they were."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchhook.stats.stat import Stat

_DIMS = 8  # in an index, at most


@dataclass(frozen=True)
class Largest:
    """One of the largest values: the number of its tensor (from 0, in the order of updates), and its index there."""

    value: float
    tensor: int
    index: tuple[int, ...]


class TopK(Stat):
    """The `k` largest values with their indices, largest first; NaN is left out.

    >>> TopK(k=2).of(torch.tensor([[1.0, 5.0]]), torch.tensor([[3.0, 2.0]]))
    [Largest(value=5.0, tensor=0, index=(0, 1)), Largest(value=3.0, tensor=1, index=(0, 0))]
    """

    name = "topk"
    additive = False

    def __init__(self, k: int = 10) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ValueError(f"k must be a whole number of at least 1, not {k!r}")
        self.k = k

    def empty(self, x: Tensor) -> Tensor:
        """Rows of value, tensor and index; the row above them has the number of tensors."""
        state = torch.full((self.k + 1, 2 + _DIMS), -1.0, dtype=torch.float64, device=x.device)
        state[:, 0] = -math.inf
        state[0, :1] = 0
        return state

    def update(self, state: Tensor, x: Tensor) -> None:
        if x.dim() > _DIMS:
            x = x.flatten(_DIMS - 1)
        flat = x.reshape(-1)
        flat = flat.float() if x.is_floating_point() and x.element_size() == 1 else flat
        flat = flat.where(~flat.isnan(), -math.inf) if x.is_floating_point() else flat.double()
        values, places = flat.topk(min(self.k, flat.numel()))
        new = self.empty(x)
        rows = new[1 : 1 + len(values)]
        rows[:, 0] = values
        rows[:, 1] = 0
        for dim in range(x.dim() - 1, -1, -1):
            rows[:, 2 + dim] = places % x.shape[dim]
            places = places // x.shape[dim]
        new[0, :1] = 1  # a slice, since assigning one number would copy it from the host, and wait
        state.copy_(self.merge(torch.stack([state, new])))

    def merge(self, states: Tensor) -> Tensor:
        seen = states[..., :1, 0]
        rows = states[..., 1:, :].clone()
        rows[..., 1] += seen.cumsum(0) - seen  # tensors of later states come after those of earlier ones
        rows = rows.movedim(0, -3).flatten(-3, -2)
        best = rows[..., 0].topk(self.k).indices
        merged = torch.empty_like(states[0])
        merged[..., 1:, :] = rows.gather(-2, best[..., None].expand(*best.shape, rows.shape[-1]))
        merged[..., 0, :] = states[..., 0, :].sum(0)
        return merged

    def compute(self, state: Tensor) -> list[Largest]:
        found = [row for row in state[1:].tolist() if row[0] > -math.inf]
        return [
            Largest(value, int(tensor), tuple(int(place) for place in index if place >= 0))
            for value, tensor, *index in found
        ]
