"""What a model is trained to do, judged by what its loss is computed from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from torchhook.core.batch import Loss, loss_of, main_tensor
from torchhook.rules.history import Task


def task_of(output: Any, target: Any, value: float, loss: Loss | None) -> Task | None:
    """The kind of task, from the output, target and loss `value` of one batch; None if there is no target.

    >>> output, target = torch.zeros(4, 1), torch.arange(4.0)
    >>> task_of(output, target, 3.5, lambda output, target: (output - target).square().mean()).broadcast
    True
    """
    try:
        prediction = main_tensor(output).detach()
    except ValueError:
        return None
    if not isinstance(target, Tensor):
        return None
    shapes = tuple(prediction.shape), tuple(target.shape)
    return Task(*shapes, _broadcasts(output, target, value, loss))


def _broadcasts(output: Any, target: Tensor, value: float, loss: Loss | None) -> bool:
    """Whether the targets have another shape than the outputs, and reordering them does not change the loss."""
    shape = main_tensor(output).shape
    if shape == target.shape or not target.is_floating_point() or target.squeeze().dim() != 1 or len(target) < 3:
        return False
    with torch.no_grad():
        other = float(loss_of(output, target.flip(0), loss).loss)
    return bool((target != target.flip(0)).any()) and math.isclose(other, value, rel_tol=1e-5)
