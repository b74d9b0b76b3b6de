"""What is to be explained: a `target` becomes a score, one number a sample of what the model says.

A score is made once, of the target and the output of the plain run, which settles the classes; from then on it can be
asked of any other output of the model, with its rows in any order.
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
"""A class, one a sample, a function of the output that gives one number a sample, or None for the predicted class."""


class Score:
    """One number a sample: the logit of its class, or what a function says."""

    def __init__(self, of: Callable[[Any, Tensor | None], Tensor], classes: Tensor | None, name: str) -> None:
        self._of = of
        self._classes = classes  # stays where the model is, since to read it waits for an accelerator
        self._name = name

    @staticmethod
    def of(target: Target, output: Any, samples: int | None = None) -> Score:
        """The score that `target` means, settled for the samples of `output`.

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
            return Score(_asking(target, samples), None, _name_of(target))
        logits = logits_of(output)
        classes = logits.detach().argmax(1) if target is None else _classes(target, logits)
        return Score(_picking(classes), classes, "")

    def __call__(self, output: Any, rows: Tensor | None = None) -> Tensor:
        """The number of each row of `output`; `rows` says which sample each belongs to, if not one each in order."""
        return self._of(output, rows)

    def explained(self, samples: int) -> list[int | str | None]:
        """What is explained of each sample, to be told: its class, or the name of the function."""
        if self._classes is None:
            return [self._name] * samples
        classes: list[int | str | None] = self._classes.tolist()
        return classes


def at_hand(target: Target) -> Target:
    """The same, with classes in a list: read before a run, a tensor on an accelerator waits for nothing.

    >>> at_hand(torch.tensor([3, 4]))
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
    """The logits, samples × classes: the output itself, or what it has by that name, as Hugging Face's does.

    >>> logits_of({"out": torch.ones(2, 21, 8, 8)})
    Traceback (most recent call last):
        ...
    ValueError: the model returned a dict, {out: 2×21×8×8}, which has no classes to choose from; pass a function of it \
that returns one number a sample, as target=lambda out: out['out'][:, 0].mean((1, 2))
    """
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if isinstance(found, Tensor) and found.dim() == 2 and found.is_floating_point():
        return found
    kind = "a tensor" if isinstance(output, Tensor) else f"a {type(output).__name__},"
    raise ValueError(
        f"the model returned {kind} {_outline(output)}, which has no classes to choose from; pass a function of it that"
        f" returns one number a sample, as target=lambda out: {_example(output)}"
    )


def _picking(classes: Tensor) -> Callable[[Any, Tensor | None], Tensor]:
    """The score that is the logit of the class."""

    def pick(output: Any, rows: Tensor | None) -> Tensor:
        chosen = classes if rows is None else classes[rows.to(classes.device)]
        return logits_of(output).gather(1, chosen[:, None])[:, 0]

    return pick


def _asking(function: Callable[[Any], Any], samples: int | None) -> Callable[[Any, Tensor | None], Tensor]:
    """The score that a function says."""

    def ask(output: Any, rows: Tensor | None) -> Tensor:
        found = function(output)
        name = _name_of(function)
        if not isinstance(found, Tensor) or not found.is_floating_point() or found.dim() > 1:
            said = f"shape {shape_of(found)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(f"target {name} must return a tensor of one number a sample, and it returned {said}")
        needed = samples if rows is None else len(rows)
        if needed is not None and found.shape != (needed,) and (found.dim() or rows is not None):
            said = "one number" if not found.dim() else f"{len(found)} numbers"
            raise ValueError(f"target {name} returned {said} for {needed} samples; return one for each, as out[:, 3]")
        return found

    return ask


def _classes(target: Any, logits: Tensor) -> Tensor:
    """The class of each sample, if there are such classes and so many samples."""
    samples, count = logits.shape
    given = target.tolist() if hasattr(target, "tolist") else target  # tensors and arrays
    given = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else given
    classes = [_class(one, target) for one in given] if isinstance(given, list) else [_class(given, target)] * samples
    if len(classes) != samples:
        raise ValueError(f"target must be one class a sample: it has {len(classes)}, and there are {samples} samples")
    for one in classes:
        if not 0 <= one < count:
            raise ValueError(f"target {one} is out of range: the model has {count} classes, 0 to {count - 1}")
    return torch.tensor(classes).to(logits.device, non_blocking=True)  # which waits for no run that is under way


def _class(one: Any, target: Any) -> int:
    try:
        if isinstance(one, bool):
            raise TypeError
        return index(one)
    except TypeError:
        raise TypeError(
            "target must be a class, one class a sample, a function of the model's output or None for the predicted"
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
    """How to come from such an output to one number a sample."""
    address, tensor = next(leaves(output), ((), None))
    place = "out" + "".join(f"[{key!r}]" for key in address)
    if isinstance(output, list) and output and not isinstance(output[0], Tensor):
        return "torch.stack([one[...].sum() for one in out])"
    dims = 2 if tensor is None else tensor.dim()
    if dims < 2:
        return place if dims else f"{place}[None]"
    rest = ", ".join(map(str, range(1, dims - 1)))
    return f"{place}[:, 0]" + (f".mean(({rest}))" if dims > 3 else ".mean(1)" if dims == 3 else "")
