"""One step of a training: zero the gradients, forward, loss, backward, and the step of the optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchhook.core.batch import Batch, Loss, call, loss_of

OnLoss = Callable[[Any, Tensor], None]
"""Called with the output of the model and the loss, before the backward."""


def train_step(
    model: nn.Module, optimizer: Any, batch: Batch, loss: Loss | None, on_loss: OnLoss | None = None
) -> tuple[float, int]:
    """Train `model` on one batch; without an optimizer, only run it. Returns the loss and the number of forwards."""
    forwards = 0

    def closure() -> Tensor:
        nonlocal forwards
        forwards += 1
        model.zero_grad(set_to_none=True)
        output = call(model, batch)
        value = loss_of(output, batch.target, loss).loss
        if on_loss is not None:
            on_loss(output, value)
        if value.requires_grad:
            value.backward()
        return value

    if optimizer is not None and wants_closure(optimizer):
        value = optimizer.step(closure)
    else:
        value = closure()
        if optimizer is not None:
            optimizer.step()
    return float(value.detach() if isinstance(value, Tensor) else value), forwards


def wants_closure(optimizer: Any) -> bool:
    """Whether `optimizer.step` requires a closure, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
