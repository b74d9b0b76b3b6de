"""How close values are to their limits: the largest of their dtype, the ends of a sigmoid."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchhook.stats.channels import ByUnit
from torchhook.stats.stat import Stat


class Headroom(Stat):
    """The largest absolute value, as a fraction of the largest that its dtype can hold.

    Only for float16 and the 8-bit floats: other dtypes reach far beyond what networks compute.

    >>> Headroom().of(torch.tensor([32752.0], dtype=torch.float16))
    0.5
    """

    name = "headroom"
    additive = False

    def update(self, state: Tensor, x: Tensor) -> None:
        if x.is_floating_point() and x.numel() and (largest := torch.finfo(x.dtype).max) < 1e6:
            x = x.float()
            torch.maximum(state, x.where(x.isfinite(), 0).abs().amax().double() / largest, out=state)

    def merge(self, states: Tensor) -> Tensor:
        return states.amax(0)

    def compute(self, state: Tensor) -> float:
        return float(state)


class Saturation(ByUnit):
    """The fraction of values, for each unit of a sigmoid or tanh, at the ends of its range, where gradients vanish.

    That is below 0.02 or above 0.98 for a sigmoid, beyond ±0.97 for a tanh; for other modules it is always 0.

    >>> Saturation(dim=1).bound(nn.Tanh()).of(torch.tensor([[0.99, 0.0], [-0.99, 1.0]])).tolist()
    [1.0, 0.5]
    """

    name = "saturation"
    _ends = (-float("inf"), float("inf"))

    def bound(self, module: nn.Module | None) -> Stat:
        twin = super().bound(module)
        assert isinstance(twin, Saturation)
        if isinstance(module, nn.Sigmoid):
            twin._ends = 0.02, 0.98
        elif isinstance(module, nn.Tanh):
            twin._ends = -0.97, 0.97
        return twin

    def empty(self, x: Tensor) -> Tensor:
        return torch.zeros(2, self.by_unit(x).shape[0], dtype=torch.float64, device=x.device)

    def update(self, state: Tensor, x: Tensor) -> None:
        x = self.by_unit(x, state.shape[-1])
        low, high = self._ends
        state[0] += x.shape[1]
        state[1] += ((x < low) | (x > high)).sum(1)

    def compute(self, state: Tensor) -> Tensor:
        return state[1] / state[0]
