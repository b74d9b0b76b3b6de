"""Batches as people have them: what of a batch goes into the model, what into the loss, and which loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.core.trees import Arguments, leaves, mapped

Loss = Callable[[Any, Any], Tensor]
"""From the output of a model and the target, a number to make smaller."""


class Batch(NamedTuple):
    """A batch taken apart: the arguments of the model, and what the loss compares its output with."""

    arguments: Arguments
    target: Any

    @staticmethod
    def of(data: Any) -> Batch:
        """A tuple or list is inputs and a target, a mapping is keywords, anything else is the input itself.

        Of the last two the loss is given the whole batch.

        >>> Batch.of((1, 2))
        Batch(arguments=Arguments(args=(1,), kwargs={}), target=2)
        """
        if isinstance(data, (tuple, list)) and len(data) > 1:
            return Batch(Arguments(tuple(data[:-1]), {}), data[-1])
        if isinstance(data, (tuple, list)):
            return Batch(Arguments(tuple(data), {}), None)
        if isinstance(data, Mapping):
            return Batch(Arguments((), dict(data)), data)
        return Batch(Arguments((data,), {}), data)


def on_device(data: Any, model: nn.Module) -> Any:
    """`data` where the model is; always a copy, for models may overwrite what they are given."""
    first = next(model.parameters(), None)
    device = first.device if first is not None else next((buffer.device for buffer in model.buffers()), None)
    return mapped(Tensor.clone, data) if device is None else mapped(lambda tensor: tensor.to(device, copy=True), data)


def call(model: nn.Module, batch: Batch) -> Any:
    """What `model` says to a batch."""
    return model(*batch.arguments.args, **batch.arguments.kwargs)


class Guess(NamedTuple):
    """A loss, in a few words which one it is if nobody gave one, and whether it is worth making smaller."""

    loss: Tensor
    how: str = ""
    real: bool = True


def loss_of(output: Any, target: Any, loss: Loss | None) -> Guess:
    """The loss that was given, or what it probably is.

    That is the one that the output brings along, else cross entropy for targets that are classes, else the mean square,
    and without a target the outputs along a random direction, which no one wants to be small but gradients flow from.
    """
    if loss is not None:
        return Guess(_scalar(loss(output, target)))
    brought = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(brought, Tensor):
        return Guess(_scalar(brought))
    if isinstance(output, Tensor) and not output.dim() and output.is_floating_point():
        return Guess(output)
    prediction = main_tensor(output)
    if isinstance(target, Tensor) and target.dtype in _CLASSES and target.dim() == prediction.dim() - 1:
        return Guess(F.cross_entropy(prediction, target), "cross entropy, for the targets are classes")
    if isinstance(target, Tensor) and target.shape == prediction.shape and target.is_floating_point():
        return Guess(F.mse_loss(prediction, target), "mean square, for the targets look like the outputs")
    return Guess(_along(output), "a random direction of the outputs, for no loss was given", real=False)


def main_tensor(output: Any) -> Tensor:
    """The tensor that an output is mainly about: the logits of an output that has them, else the first."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        logits: Tensor = output["logits"]
        return logits
    found = next((leaf for _, leaf in leaves(output) if leaf.is_floating_point()), None)
    if found is None:
        raise ValueError(f"the model returned a {type(output).__name__} without a tensor of numbers; pass loss=")
    assert isinstance(found, Tensor)
    return found


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must return a tensor, not a {type(loss).__name__}")
    return loss if not loss.dim() else loss.mean()


def _along(output: Any) -> Tensor:
    """The sum of all outputs, each times a random sign, over the square root of their number."""
    total: Any = 0.0
    for _, leaf in leaves(output):
        if leaf.is_floating_point() and leaf.requires_grad and leaf.numel():
            signs = torch.randint(0, 2, leaf.shape, device=leaf.device).to(leaf.dtype) * 2 - 1
            total = total + (leaf * signs).sum() / leaf.numel() ** 0.5
    if not isinstance(total, Tensor):
        raise ValueError("no output of the model has a gradient; pass a loss, or parts=('rest',)")
    return total


_CLASSES = (torch.int64, torch.int32)
