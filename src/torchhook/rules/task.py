"""What a model is trained to do, judged by what its loss is computed from."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.core.batch import Loss, loss_of, main_tensor
from torchhook.rules.history import Task


def task_of(output: Any, target: Any, value: float, loss: Loss | None) -> Task:
    """The kind of task, from the output, target and loss `value` of one batch.

    >>> output, target = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
    >>> task_of(output, target, math.log(3), F.cross_entropy).classes
    3
    """
    try:
        prediction = main_tensor(output).detach()
    except ValueError:
        return Task(value, (), None)
    shape = tuple(prediction.shape)
    if not isinstance(target, Tensor):
        return Task(value, shape, None)
    classes = _classes(prediction, target, value)
    broadcast = classes is None and _broadcasts(output, target, value, loss)
    return Task(value, shape, tuple(target.shape), classes, _are_probabilities(prediction), broadcast)


def _classes(prediction: Tensor, target: Tensor, value: float) -> int | None:
    """The number of classes, if the loss is the cross entropy of the outputs."""
    try:
        entropy = float(F.cross_entropy(prediction.float(), target))
    except (RuntimeError, ValueError, IndexError):  # not logits and classes
        return None
    is_entropy = prediction.dim() > 1 and math.isclose(entropy, value, rel_tol=1e-3, abs_tol=1e-6)
    return prediction.shape[1] if is_entropy else None


def _are_probabilities(prediction: Tensor) -> bool:
    total = prediction.float().sum(1 if prediction.dim() > 1 else -1) if prediction.dim() else prediction
    return bool((prediction >= 0).all()) and bool(((total - 1).abs() < 1e-3).all())


def _broadcasts(output: Any, target: Tensor, value: float, loss: Loss | None) -> bool:
    """Whether the targets have another shape than the outputs, and reordering them does not change the loss."""
    shape = main_tensor(output).shape
    if shape == target.shape or not target.is_floating_point() or target.squeeze().dim() != 1 or len(target) < 3:
        return False
    with torch.no_grad():
        other = float(loss_of(output, target.flip(0), loss).loss)
    return bool((target != target.flip(0)).any()) and math.isclose(other, value, rel_tol=1e-5)
