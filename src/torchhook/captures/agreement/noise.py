"""Noise the size of rounding errors: how far it moves a value shows what rounding alone can do there."""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor

from torchhook.captures.agreement.rounding import floor, precision
from torchhook.core.edit import Edit
from torchhook.core.trees import mapped


def nudged(value: Tensor, seed: int, spacing: float, least: float = 0.0) -> Tensor:
    """`value` with each element moved up or down, at random, by its size times `spacing`, plus `least`.

    >>> nudged(torch.tensor([1.0, -2.0]), seed=1, spacing=0.5).tolist()
    [1.5, -1.0]
    """
    generator = torch.Generator(value.device).manual_seed(seed)
    wide = value if value.dtype in (torch.float32, torch.float64) else value.float()
    signs = torch.empty_like(wide).random_(0, 2, generator=generator).mul_(2).sub_(1)
    return wide.abs().mul_(spacing).add_(least).mul_(signs).add_(wide).to(value.dtype)


class NoisyOutputs(Edit):
    """Moves the outputs of modules by about one rounding error: of their dtype, or of machine epsilon `epsilon`."""

    whole = True

    def __init__(self, seed: int, epsilon: float = 0.0) -> None:
        super().__init__()
        self.epsilon = epsilon
        self._seeds = count(1_000_000 * seed)

    def change(self, x: Any, call: int) -> Any:
        return mapped(self._moved, x, faithful=True)

    def _moved(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        return nudged(tensor, next(self._seeds), max(self.epsilon, precision([tensor])), floor([tensor]))
