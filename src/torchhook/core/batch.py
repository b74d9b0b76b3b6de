"""Batches of a data loader: which part goes into the model, which part into the loss, and which loss that is."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from torchhook.core.selection import require_module, unwrapped
from torchhook.core.trees import Arguments, leaves, mapped

ToInputs = Callable[[Any], Any]
"""Turns a batch of a loader into what the model takes: a tensor, a tuple that ends with the target, or a dict."""

Loss = Callable[[Any, Any], Tensor]
"""Takes the output of a model and the target, returns the number to minimize."""


class Batch(NamedTuple):
    """A batch as the arguments of the model and the target of the loss."""

    arguments: Arguments
    target: Any

    @staticmethod
    def of(data: Any) -> Batch:
        """A tuple or list holds inputs and a target, a mapping holds keywords, anything else is the input itself.

        A packed sequence is one input, too. In the last two cases the target is the whole batch.

        >>> Batch.of((1, 2))
        Batch(arguments=Arguments(args=(1,), kwargs={}), target=2)
        """
        if _holds_several(data) and len(data) > 1:
            return Batch(Arguments(tuple(data[:-1]), {}), data[-1])
        if _holds_several(data):
            return Batch(Arguments(tuple(data), {}), None)
        if isinstance(data, Mapping):
            return Batch(Arguments((), dict(data)), data)
        return Batch(Arguments((data,), {}), data)


def on_device(data: Any, model: nn.Module) -> Any:
    """A copy of `data` on the model's device, since models may overwrite their inputs and leave gradients in them."""
    device = next((tensor.device for tensor in chain(model.parameters(), model.buffers())), None)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)

    return mapped(moved, data)


def fitted(value: Any, model: nn.Module) -> Any:
    """A copy of `value` on the model's device, its floating-point tensors in the model's dtype."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return mapped(cast, on_device(value, model))


def call(model: nn.Module, batch: Batch) -> Any:
    """The output of `model` for a batch."""
    return model(*batch.arguments.args, **batch.arguments.kwargs)


class Guess(NamedTuple):
    """A loss, how it was chosen if none was given, and whether minimizing it makes sense."""

    loss: Tensor
    how: str = ""
    real: bool = True


def loss_of(output: Any, target: Any, loss: Loss | None) -> Guess:
    """The given loss, or the most likely one.

    That is the loss in the output itself, else cross entropy if the targets are classes, else the mean squared error if
    they look like the outputs, else the outputs along a random direction: not worth minimizing, but gradients flow.
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
        logits = _classes_second(prediction, target)
        if logits is not None:
            return Guess(F.cross_entropy(logits, target), "cross entropy, since the targets are classes")
    if isinstance(target, Tensor) and target.shape == prediction.shape and target.is_floating_point():
        return Guess(F.mse_loss(prediction, target), "mean squared error, since the targets look like the outputs")
    return Guess(_along(output), "a random direction of the outputs, since no loss was given", real=False)


def _classes_second(prediction: Tensor, target: Tensor) -> Tensor | None:
    """`prediction` as cross entropy takes it; None if the numbers in `target` are not classes of its last dimension."""
    if prediction.shape[:-1] != target.shape or prediction.shape[2:] == target.shape[1:]:
        return prediction
    return prediction.movedim(-1, 1) if bool((target < prediction.shape[-1]).all()) else None


def main_tensor(output: Any) -> Tensor:
    """The main tensor of an output: its logits if it has any, else its first floating-point tensor."""
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        logits: Tensor = output["logits"]
        return logits
    found = next((leaf for _, leaf in leaves(output) if leaf.is_floating_point()), None)
    if found is None:
        raise ValueError(f"the model returned a {type(output).__name__} without a floating-point tensor; pass loss=")
    assert isinstance(found, Tensor)
    return found


class Samples(NamedTuple):
    """How many samples a batch has, and which argument of the model shows it."""

    length: int
    argument: str


def samples_of(batch: Batch) -> Samples:
    """The number of samples: the most common length among arguments with at least two dimensions, if there are any.

    >>> samples_of(Batch.of({"scale": torch.ones(3), "x": torch.ones(40, 5)}))
    Samples(length=40, argument="'x'")
    """
    given = [(address, leaf) for address, leaf in leaves(batch.arguments) if leaf.dim()]
    if not given:
        raise ValueError("the batch has no tensor with a dimension for samples")
    lengths = Counter(len(leaf) for _, leaf in leaves((batch.arguments, batch.target)) if leaf.dim())
    likely = [(address, leaf) for address, leaf in given if leaf.dim() > 1] or given
    (_, *argument), found = max(likely, key=lambda one: lengths[len(one[1])])  # the first of those that are as likely
    return Samples(len(found), ".".join(map(repr, argument)))


class InputBatches:
    """Batches of a model, from whatever data its user has: a loader, or a single batch.

    A tensor is the input, a tuple holds positional arguments and, last, the target; with `targets`, all of them are
    arguments if `forward` needs that many. A dict holds keywords if `forward` takes its keys; otherwise
    `batch_to_inputs` turns it into one of these. Where there are no `targets`, a tuple of tensors that differ in length
    alone, as `Tensor.split` returns them, is a list of batches.

    >>> loader = [{"image": torch.ones(1, 2), "label": 1}]
    >>> list(InputBatches(loader, nn.Linear(2, 1), lambda batch: batch["image"]))
    [tensor([[1., 1.]])]
    >>> list(InputBatches(loader, nn.Linear(2, 1)))
    Traceback (most recent call last):
    TypeError: a batch of loader has the fields 'image', 'label', but Linear.forward takes 'input'; pass
    batch_to_inputs=, a function that turns a batch into inputs, such as lambda batch: batch['image']
    """

    def __init__(
        self,
        data: Any,
        model: nn.Module,
        batch_to_inputs: ToInputs | None = None,
        argument: str = "loader",
        *,
        targets: bool = False,
    ) -> None:
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes, nn.Module)):
            raise TypeError(
                f"{argument} must be a tensor, a tuple or dict of them, or an iterable of such batches, for example a"
                f" DataLoader, not a {type(data).__name__}"
            )
        if batch_to_inputs is not None and not callable(batch_to_inputs):
            raise TypeError(f"batch_to_inputs must be a function of a batch, not {batch_to_inputs!r:.80}")
        single = isinstance(data, (Tensor, Mapping)) or (isinstance(data, tuple) and (targets or not _is_split(data)))
        self.loader = [data] if single else data
        self.argument = argument
        self._model, self._to_inputs = model, batch_to_inputs
        self._required = _required(model) if targets else 0

    @cached_property
    def _keywords(self) -> Keywords:
        return Keywords.of(self._model)

    def __iter__(self) -> Iterator[Any]:
        return map(self._usable, self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # a TypeError is the right answer for a stream

    @property
    def repeats(self) -> bool:
        """Whether the batches can be read more than once."""
        return iter(self.loader) is not self.loader

    def _usable(self, batch: Any) -> Any:
        """A batch for `Batch.of`."""
        if self._to_inputs is not None:
            batch = self._to_inputs(batch)
        if isinstance(batch, Mapping) and not all(map(self._keywords.takes, batch)):
            raise TypeError(self._unusable(batch))
        if _holds_several(batch) and 1 < len(batch) <= self._required and batch[-1] is not None:
            return (*batch, None)  # all of them are arguments
        return batch

    def _unusable(self, batch: Mapping[Any, Any]) -> str:
        fields = list(batch)
        likely = next((key for key in fields if isinstance(batch[key], Tensor) and batch[key].dim() > 1), fields[0])
        return (
            f"a batch of {self.argument} has the fields {', '.join(map(repr, fields))}, but"
            f" {type(self._model).__name__}.forward takes {', '.join(map(repr, self._keywords.names)) or 'none'}; pass"
            f" batch_to_inputs=, a function that turns a batch into inputs, such as lambda batch: batch[{likely!r}]"
        )


class Keywords(NamedTuple):
    """The keywords that the forward of a model takes."""

    names: tuple[str, ...]
    others: bool  # whether it also takes **kwargs, or does not say what it takes

    @staticmethod
    def of(model: nn.Module) -> Keywords:
        """The keywords of a model, wrapped or not.

        >>> Keywords.of(nn.Linear(2, 2))
        Keywords(names=('input',), others=False)
        """
        try:
            found = inspect.signature(unwrapped(model).forward).parameters.values()
        except (TypeError, ValueError):  # not written in Python: it raises for itself on a wrong argument
            return Keywords((), True)
        others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in found)
        return Keywords(tuple(parameter.name for parameter in found if parameter.kind in _BY_NAME), others)

    def takes(self, name: Any) -> bool:
        """Whether the model can be called with an argument of this name."""
        return self.others or name in self.names


def inputs_of(x: Any, model: nn.Module) -> Arguments:
    """The arguments for one call of `model`: those that `x` stands for, or, of a DataLoader, its first inputs.

    >>> inputs_of((1, 2), nn.Bilinear(1, 1, 1))
    Arguments(args=(1, 2), kwargs={})
    """
    require_module(model)
    if isinstance(x, DataLoader):
        return Batch.of(next(iter(InputBatches(x, model, argument="x")))).arguments
    (given,) = InputBatches([x], model, argument="x")
    return Arguments.of(given)


def _holds_several(data: Any) -> bool:
    """Whether these are several values."""
    return isinstance(data, (tuple, list)) and not isinstance(data, PackedSequence)


def _required(model: nn.Module) -> int:
    """How many positional arguments the forward of a model must have."""
    try:
        found = inspect.signature(unwrapped(model).forward).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = [one for one in found if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return sum(one.default is one.empty for one in positional)


def _is_split(data: tuple[Any, ...]) -> bool:
    """Whether these are the parts of one tensor of samples."""
    tensors = all(isinstance(part, Tensor) and part.dim() > 1 for part in data)
    return tensors and len({(part.dtype, part.shape[1:]) for part in data}) == 1


def batch_count(loader: Iterable[Any]) -> int | None:
    """The number of batches, None if it is unknown."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a stream
        return None


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must return a tensor, not a {type(loss).__name__}")
    return loss if not loss.dim() else loss.mean()


def _along(output: Any) -> Tensor:
    """The sum of all outputs, each times a random number, divided by the square root of their number.

    Signs alone would cancel out, now and then, in the gradient of a bias.
    """
    total: Any = 0.0
    for _, leaf in leaves(output):
        if leaf.is_floating_point() and leaf.numel() and (leaf.requires_grad or not torch.is_grad_enabled()):
            total = total + (leaf * torch.randn_like(leaf)).sum() / leaf.numel() ** 0.5
    if not isinstance(total, Tensor):
        raise ValueError("no output has a gradient: pass a loss, or leave some parameters trainable")
    return total


_CLASSES = (torch.int64, torch.int32)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
