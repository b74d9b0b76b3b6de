"""What plots of tensors take: an array, values by name, one layer of a capture, or a whole capture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from torchhook.captures.result import Calls, Capture
from torchhook.core.trees import leaves
from torchhook.plot.arrays import ARRAY, numbers

_IMAGES = (3, 4)  # dimensions of [C, H, W] and [N, C, H, W]


class Layer(NamedTuple):
    """The values of one layer, with its path and its class as far as they are known."""

    path: str
    kind: str
    values: Tensor

    @property
    def title(self) -> str:
        """The path, and the class in brackets.

        >>> import torch
        >>> Layer("layer1", "Sequential", torch.ones(1)).title, Layer("a", "", torch.ones(1)).title
        ('layer1 (Sequential)', 'a')
        """
        return f"{self.path} ({self.kind})" if self.kind else self.path


def layers_of(given: Any, argument: str = "x") -> list[Layer]:
    """The layers in what a plot was given; of a container the first tensor, of a list of calls the latest.

    >>> import torch
    >>> [layer.path for layer in layers_of({"a": torch.ones(2), "b": [[1.0], [2.0]]})]
    ['a', 'b']
    """
    if isinstance(given, (Calls, Capture)):
        some = [given] if isinstance(given, Calls) else given.values()
        return [layer for calls in some for layer in _of_calls(calls)]
    if isinstance(given, Mapping):
        return [Layer(str(name), "", _tensor(_latest(value), f"{argument}[{name!r}]")) for name, value in given.items()]
    return [Layer("", "", _tensor(given, argument, f"{ARRAY}, a dict of these, a capture or one layer of it"))]


def maps_of(given: Any, argument: str = "x") -> list[Layer]:
    """The layers that have feature maps, which a convolutional net's captured outputs [N, C, H, W] are.

    >>> import torch
    >>> [layer.path for layer in maps_of({"conv": torch.ones(2, 3, 4, 4), "fc": torch.ones(2, 10)})]
    ['conv']
    """
    layers = layers_of(given, argument)
    if not isinstance(given, Mapping):
        return layers
    dims = (4,) if isinstance(given, Capture) else _IMAGES  # [N, T, D] of a transformer is not an image
    found = [layer for layer in layers if layer.values.dim() in dims and layer.values.shape[-2:].numel() > 1]
    if not found:
        shapes = ", ".join(f"{layer.path!r} {list(layer.values.shape)}" for layer in layers[:3]) or "nothing"
        raise ValueError(f"{argument} has no feature maps [N, C, H, W]: it holds {shapes}; capture a convolution")
    return found


def first_sample(
    layer: Layer,
    argument: str,
    needed: str = "[C, H, W] or [N, C, H, W]",
    remedy: str = "reshape it, for example x.view(C, H, W)",
) -> Tensor:
    """The first sample of four dimensions; three dimensions as they are.

    >>> import torch
    >>> first_sample(Layer("conv", "", torch.ones(2, 3, 4, 5)), "x").shape
    torch.Size([3, 4, 5])
    """
    shape = list(layer.values.shape)
    if len(shape) not in (3, 4):
        where = f" of {layer.path!r}" if layer.path else ""
        raise ValueError(f"{argument}{where} must be {needed}, not of shape {shape}: {remedy}")
    if not layer.values.numel():
        raise ValueError(f"{argument} is empty: its shape is {shape}")
    return numbers(layer.values[0] if len(shape) == 4 else layer.values, argument)


def _of_calls(calls: Calls) -> list[Layer]:
    """The latest output of a layer; nothing if that has no tensor."""
    kind = calls.module_class.__name__ if calls.module_class else ""
    return [Layer(calls.path, kind, tensor.detach()) for _, tensor in islice(leaves(calls.output), 1)]


def _latest(value: Any) -> Any:
    """The newest of the values that a `HookManager` keeps in a list."""
    kept = isinstance(value, Sequence) and bool(value) and isinstance(value[-1], Tensor)
    return value[-1] if kept else value


def _tensor(value: Any, argument: str, taken: str = ARRAY) -> Tensor:
    return value.detach() if isinstance(value, Tensor) else numbers(value, argument, taken)
