"""What models are compared on: a batch, and a loss as a function of output and target."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchhook.core.batch import Batch, Loss
from torchhook.core.trees import Arguments


def task_of(x: Any, loss: Callable[..., Tensor] | None) -> tuple[Batch, Loss | None]:
    """The batch that `x` stands for, and the loss; if that takes a target, it is the last element of the tuple `x`."""
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the output, or of output and target, not {loss!r:.80}")
    if loss is not None and _takes_target(loss):
        return Batch.of(x), loss
    return Batch(Arguments.of(x), None), None if loss is None else lambda output, _: loss(output)


def _takes_target(loss: Callable[..., Tensor]) -> bool:
    """Whether `loss` cannot be called with the output alone."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
        signature.bind("output")
    except TypeError:
        return True
    except ValueError:  # a builtin without a signature
        return False
    return False
