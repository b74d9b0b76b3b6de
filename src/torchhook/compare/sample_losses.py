"""The loss, confidence and entropy of each sample of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.core.batch import Batch, Loss, main_tensor
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves, mapped

_IGNORED = -100  # a target that does not count, as in torch's cross entropy
_PASS = "pass loss=, a function from the output and the target of one sample to its loss"


def losses(loss: Loss | None, count: int) -> Callable[[Any, Any], Tensor]:
    """A function from the output and the target of `count` samples to the loss of each.

    Without `loss` it is cross entropy or the mean squared error, depending on the targets.
    """

    def by_sample(output: Any, target: Any) -> Tensor:
        if loss is not None:
            rows = [(_row(output, number, count), _row(target, number, count)) for number in range(count)]
            return torch.stack([loss(*row).mean() for row in rows])
        prediction = main_tensor(output)
        if _are_classes(prediction, target):
            _require_no_sequence(prediction, target)
            each = F.cross_entropy(prediction, target.long(), reduction="none", ignore_index=_IGNORED)
            counts = (target != _IGNORED).reshape(count, -1)
        elif isinstance(target, Tensor) and target.shape == prediction.shape and target.is_floating_point():
            each = (prediction - target).square()
            counts = torch.ones_like(each, dtype=torch.bool).reshape(count, -1)
        else:
            raise ValueError(
                f"cannot guess the loss: the targets are neither classes nor of the shape of the outputs; {_PASS}"
            )
        _require_models_loss(output, each.sum() / counts.sum())
        mean = each.reshape(count, -1).sum(1) / counts.sum(1).clamp(min=1)
        return torch.where(counts.any(1), mean, torch.nan)

    return by_sample


def confidence(output: Any, target: Any, count: int) -> dict[str, Tensor]:
    """The confidence and negative entropy of each sample; empty if the model does not classify."""
    logits = next((leaf for _, leaf in leaves(output) if leaf.is_floating_point()), None)
    if logits is None:
        return {}
    logits = main_tensor(output).detach().double()
    if not (_are_classes(logits, target) and logits.dim() == 2 and logits.shape[1] > 1 and len(logits) == count):
        return {}
    ignored = target == _IGNORED
    right = target.long().masked_fill(ignored, 0)[:, None]
    others = logits.scatter(1, right, -torch.inf).logsumexp(1)
    entropy = torch.special.entr(logits.softmax(1)).sum(1)
    found = {"confidence": logits.gather(1, right)[:, 0] - others, "entropy": -entropy}
    return {name: score.masked_fill(ignored, torch.nan) for name, score in found.items()}


def target_of(batch: Batch) -> Any:
    """The target of a batch; for a mapping its ``labels``, if it has any."""
    target = batch.target
    return target["labels"] if isinstance(target, Mapping) and "labels" in target else target


def _require_no_sequence(prediction: Tensor, target: Tensor) -> None:
    """Raise for outputs of tokens: whether they are for this token or the next cannot be guessed."""
    if target.dim() > 1 and prediction.shape[:-1] == target.shape:
        raise ValueError(
            f"cannot guess the loss: outputs {shape_of(prediction)} and targets {shape_of(target)} look like sequences,"
            f" and which output belongs to which target is unknown; {_PASS}"
        )


def _require_models_loss(output: Any, mean: Tensor) -> None:
    """Raise if the output has a loss of its own that differs from the guess."""
    brought = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(brought, Tensor):
        return
    own, guessed = brought.detach().mean().item(), mean.detach().item()
    if abs(own - guessed) > max(1e-3, 4 * torch.finfo(mean.dtype).eps) * max(abs(own), abs(guessed)):
        raise ValueError(
            f"the model's own loss for a batch is {own:.4g}, but the guessed one is {guessed:.4g}; {_PASS}"
        )


def _are_classes(prediction: Tensor, target: Any) -> bool:
    return (
        isinstance(target, Tensor)
        and target.dtype in (torch.int64, torch.int32)
        and target.dim() == prediction.dim() - 1
    )


def _row(value: Any, number: int, count: int) -> Any:
    """One sample of every tensor in `value`."""
    return mapped(lambda x: x[number : number + 1] if x.dim() and len(x) == count else x, value)
