"""What a shared gradient reveals about its batch: inputs of a linear layer that can be computed from it exactly.

A unit of a linear layer that is active for only one sample of a batch has that sample's gradient, and dL/dW over dL/db
of that unit is the input of the layer for that sample.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torchhook.compare.sample_gradients import Flow

_EXACT = 1e-3  # relative distance up to which an inverted input counts as revealed


class SharedGradient(NamedTuple):
    """What the gradient of one batch reveals about its samples.

    `alone` are the numbers of the samples that have an active unit of the first linear layer to themselves, and
    `inverted` those whose input was then recovered from the gradient.
    """

    size: int
    alone: tuple[int, ...]
    inverted: tuple[int, ...]


def inverted(flow: Flow) -> SharedGradient:
    """Recover the inputs of a linear layer from its gradient."""
    x, gradient = flow.inputs[0], flow.gradients[0]
    active = gradient != 0
    own = torch.where(active & (active.sum(0) == 1), gradient.abs(), 0.0)  # samples × units
    size, unit = own.max(1)
    alone = size > 0
    recovered = flow.totals["weight"][unit] / flow.totals["bias"][unit, None]
    off = (recovered - x).norm(dim=1) / x.norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
    numbers = (tuple(mask.nonzero()[:, 0].tolist()) for mask in (alone, alone & (off < _EXACT)))
    return SharedGradient(len(x), *numbers)


def why_not_invertible(path: str, flow: Flow) -> str:
    """Why the input of a linear layer cannot be computed from its gradient; empty if it can."""
    layer: Any = flow.module
    if layer.bias is None:
        return f"{path!r} has no bias: the input is the gradient of the weight divided by that of the bias"
    if not (layer.weight.requires_grad and layer.bias.requires_grad):
        return f"{path!r} is frozen, so it has no gradient to share"
    if len(flow.inputs) > 1 or flow.inputs[0].dim() != 2:
        return f"{path!r} is applied to several positions of a sample"
    if not all(total.isfinite().all() for total in flow.totals.values()):
        return f"the gradient of {path!r} is not finite"
    return ""
