"""What to explain: a `target` becomes a score, one number per sample computed from the output of the model.

A score is made once, from the target and the output of the plain run, which fixes the classes. After that it applies to
any other output of the model, with its rows in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchhook.core.text import shape_of
from torchhook.core.trees import leaves

Target: TypeAlias = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None
"""A class, one class per sample, a function from the output to one number per sample, or None (the predicted class)."""


class Score:
    """One number per sample: the logit of its class, or the result of a function."""

    def __init__(
        self, of: Callable[[Any, Tensor | None], Tensor], classes: Tensor | list[int] | None, name: str
    ) -> None:
        self._of = of
        self._classes = classes  # those predicted stay on the model's device: reading them waits for an accelerator
        self._name = name

    @staticmethod
    def of(target: Target, output: Any, samples: int | None = None) -> Score:
        """The score that `target` stands for, with the classes fixed for the samples of `output`.

        >>> output = torch.tensor([[1.0, 5.0, 2.0], [4.0, 0.0, 3.0]])
        >>> score = Score.of(None, output)
        >>> score.explained(2), score(output)
        ([1, 0], tensor([5., 4.]))
        >>> score(2 * output, rows=torch.tensor([1, 1]))
        tensor([2., 8.])
        >>> Score.of(lambda output: output.amax(1), output)(output)
        tensor([5., 4.])
        """
        if callable(target) and not isinstance(target, Tensor):
            return Score(_result_of(target, samples), None, _name_of(target))
        logits = logits_of(output)
        if target is None:
            predicted = logits.detach().argmax(1)
            return Score(_logit_of(predicted), predicted, "")
        given = _classes(target, logits)
        there = torch.tensor(given).to(logits.device, non_blocking=True)  # without waiting for a run in progress
        return Score(_logit_of(there), given, "")

    def __call__(self, output: Any, rows: Tensor | None = None) -> Tensor:
        """The score of each row of `output`; `rows` says which sample each belongs to, by default one each in order."""
        return self._of(output, rows)

    def explained(self, samples: int) -> list[int | str | None]:
        """What is explained for each sample: its class, or the name of the function."""
        if self._classes is None:
            return [self._name] * samples
        return self._classes.tolist() if isinstance(self._classes, Tensor) else list(self._classes)


def classes_as_list(target: Target) -> Target:
    """The target, with a tensor of classes as a list: reading it before the run does not wait for an accelerator.

    >>> classes_as_list(torch.tensor([3, 4]))
    [3, 4]
    """
    return target.tolist() if isinstance(target, Tensor) else target


def first_target(target: Target) -> Target:
    """The target of the first sample alone.

    >>> first_target([3, 4]), first_target(3)
    ([3], 3)
    """
    if isinstance(target, Sequence) or (isinstance(target, Tensor) and target.dim()):
        return target[:1]
    return target


def logits_of(output: Any) -> Tensor:
    """The logits, samples × classes: the output itself, or its attribute of that name, as in Hugging Face models.

    >>> logits_of({"out": torch.ones(2, 21, 8, 8)})
    Traceback (most recent call last):
        ...
    ValueError: the model returned a dict, {out: 2×21×8×8}, which has no classes to choose from; pass a function that \
turns it into one number per sample, such as target=lambda out: out['out'][:, 0].mean((1, 2))
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(found, Tensor) and found.dim() == 2 and found.is_floating_point():
        return found
    kind = "a tensor" if isinstance(output, Tensor) else f"a {type(output).__name__},"
    raise ValueError(
        f"the model returned {kind} {_outline(output)}, which has no classes to choose from; pass a function that turns"
        f" it into one number per sample, such as target=lambda out: {_example(output)}"
    )


def _logit_of(classes: Tensor) -> Callable[[Any, Tensor | None], Tensor]:
    """The score of a class: its logit."""

    def pick(output: Any, rows: Tensor | None) -> Tensor:
        chosen = classes if rows is None else classes[rows.to(classes.device)]
        return logits_of(output).gather(1, chosen[:, None])[:, 0]

    return pick


def _result_of(function: Callable[[Any], Any], samples: int | None) -> Callable[[Any, Tensor | None], Tensor]:
    """The score of a function: its result, checked."""

    def ask(output: Any, rows: Tensor | None) -> Tensor:
        found = function(output)
        name = _name_of(function)
        if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() > 1:
            said = f"shape {shape_of(found)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(f"target {name} must return a tensor with one number per sample, but it returned {said}")
        needed = samples if rows is None else len(rows)
        if needed is not None and found.shape != (needed,) and (found.dim() or rows is not None):
            said = "one number" if not found.dim() else f"{len(found)} numbers"
            raise ValueError(
                f"target {name} returned {said} for {needed} samples; return one for each, such as out[:, 3]"
            )
        return found

    return ask


def _classes(target: Any, logits: Tensor) -> list[int]:
    """The class of each sample; raises if a class is out of range or their number is wrong."""
    samples, count = logits.shape
    given = target.tolist() if hasattr(target, "tolist") else target  # tensors and arrays
    given = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else given
    classes = [_class(one, target) for one in given] if isinstance(given, list) else [_class(given, target)] * samples
    if len(classes) != samples:
        raise ValueError(f"target must be one class per sample: it has {len(classes)} for {samples} samples")
    for one in classes:
        if not 0 <= one < count:
            raise ValueError(f"target {one} is out of range: the model has {count} classes, 0 to {count - 1}")
    return classes


def _class(one: Any, target: Any) -> int:
    try:
        if isinstance(one, bool):
            raise TypeError
        return index(one)
    except TypeError:
        raise TypeError(
            "target must be a class, one class per sample, a function of the model's output or None for the predicted"
            f" class, not {target!r:.80}"
        ) from None


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _outline(output: Any) -> str:
    if isinstance(output, (Tensor, Mapping, tuple, list)):
        return shape_of(dict(output) if isinstance(output, Mapping) else output)
    found = {".".join(map(str, address)): tensor for address, tensor in leaves(output)}
    return shape_of(found) if found else "without a tensor"


def _example(output: Any) -> str:
    """An expression that turns such an output into one number per sample."""
    address, tensor = next(leaves(output), ((), None))
    place = "out" + "".join(f"[{key!r}]" for key in address)
    if isinstance(output, list) and output and not isinstance(output[0], Tensor):
        return "torch.stack([one[...].sum() for one in out])"
    dims = 2 if tensor is None else tensor.dim()
    if dims < 2:
        return place if dims else f"{place}[None]"
    rest = ", ".join(map(str, range(1, dims - 1)))
    return f"{place}[:, 0]" + (f".mean(({rest}))" if dims > 3 else ".mean(1)" if dims == 3 else "")
