"""The layers whose channels can be pruned, and the dimensions of their channels."""

from __future__ import annotations

from torch import nn

from torchhook.core.batch import Batch, samples_of
from torchhook.core.torch_internals import CONVOLUTIONS
from torchhook.core.trees import mapped

LAYERS = (nn.Linear, CONVOLUTIONS)


def channels_of(layer: nn.Module) -> int:
    """The number of output channels of a layer."""
    found = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    assert isinstance(found, int)
    return found


def inputs_of(layer: nn.Module) -> int:
    """The number of input channels of a layer."""
    found = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    assert isinstance(found, int)
    return found


def channel_dim(layer: nn.Module) -> int:
    """The dimension of the channels in the input and output of a layer, counted from the last."""
    return -1 if isinstance(layer, nn.Linear) else -1 - len(layer.kernel_size)  # type: ignore[arg-type]  # a tuple


def first_of(batch: Batch, count: int) -> Batch:
    """The first samples of a batch, without a target."""
    size = samples_of(batch).length
    return Batch(mapped(lambda x: x[:count] if x.dim() and len(x) == size else x, batch.arguments), None)
