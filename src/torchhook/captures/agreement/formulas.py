"""Computes what a layer would have returned for another input, given nothing but tensors.

A recording has no code. But what most layers do is one of a few formulas of their input, their parameters and a number
or two. A formula is only used if it gives what the layer itself returned for its own input, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.captures.agreement.facts import ModuleFacts
from torchhook.captures.agreement.rounding import Absent, gap, precision

_CLOSE = 4.0  # rounding errors, plus those of long sums, by which a formula may miss what the layer returned
_MOST = 1e10  # products: larger layers are not computed again

Formula = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """A layer as it was recorded: one input, one output, its parameters and buffers, and what is known of its class."""

    facts: ModuleFacts
    given: Tensor
    returned: Tensor
    parameters: Mapping[str, Tensor]


def formula_of(layer: Layer) -> Formula | None:
    """The formula that the layer computes; None if it is none that is known."""
    tensors = [layer.given, layer.returned, *layer.parameters.values()]
    if any(isinstance(tensor, Absent) or tensor.is_complex() or tensor.is_nested for tensor in tensors):
        return None
    if layer.returned.numel() * layer.facts.fan_in > _MOST:
        return None
    close = _CLOSE * max(precision(tensors), layer.facts.epsilon) * max(1.0, (layer.facts.fan_in / 256) ** 0.5)
    for formula in _candidates(layer):
        try:
            predicted = formula(layer.given)
        except (RuntimeError, ValueError, TypeError, IndexError):  # it does not fit
            continue
        if predicted.shape == layer.returned.shape and gap(layer.returned, predicted).error <= close:
            return formula
    return None


def _candidates(layer: Layer) -> Iterator[Formula]:
    """The formulas that the parameters of a layer allow."""
    wide = {name: tensor.double() for name, tensor in layer.parameters.items()}
    weight, bias = wide.get("weight"), wide.get("bias")
    if not layer.parameters:
        yield from _ELEMENTWISE
    elif weight is None:
        return
    elif not layer.given.is_floating_point():
        yield lambda x: weight[x.long()]
    elif weight.dim() == 2:
        yield lambda x: F.linear(x.double(), weight, bias)
        yield lambda x: F.linear(x.double(), weight.T, bias)  # as GPT-2 of transformers has it
    elif weight.dim() == 1:
        yield from _norms(layer, weight, bias, wide)
    else:
        yield partial(_convolution, layer.facts, weight, bias)


def _norms(layer: Layer, weight: Tensor, bias: Tensor | None, wide: Mapping[str, Tensor]) -> Iterator[Formula]:
    eps = [value for name, value in layer.facts.numbers.items() if 0 < value < 0.1 and "eps" in name]
    shape = weight.shape
    for least in eps:
        if "running_mean" in wide and "running_var" in wide and not layer.facts.training:
            mean, var = wide["running_mean"], wide["running_var"]
            yield lambda x: F.batch_norm(x.double(), mean, var, weight, bias, eps=least)  # noqa: B023 (used at once)
        yield lambda x: F.layer_norm(x.double(), shape, weight, bias, least)  # noqa: B023
        yield lambda x: F.rms_norm(x.double(), shape, weight, least)  # noqa: B023
        yield lambda x: F.rms_norm(x.double(), shape, 1 + weight, least)  # noqa: B023 (as Gemma has it)
        groups = int(layer.facts.numbers.get("num_groups", 1))
        yield lambda x: F.group_norm(x.double(), groups, weight, bias, least)  # noqa: B023


def _convolution(facts: ModuleFacts, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[weight.dim()]
    sizes = {name: facts.sizes[name] for name in ("stride", "padding", "dilation") if name in facts.sizes}
    found: Tensor = convolve(x.double(), weight, bias, **sizes, groups=int(facts.numbers.get("groups", 1)))
    return found


_ELEMENTWISE: tuple[Formula, ...] = (
    lambda x: x.double(),
    lambda x: F.relu(x.double()),
    lambda x: F.gelu(x.double()),
    lambda x: F.gelu(x.double(), approximate="tanh"),
    lambda x: F.silu(x.double()),
    lambda x: F.relu6(x.double()),
    lambda x: F.hardswish(x.double()),
    lambda x: F.hardsigmoid(x.double()),
    lambda x: F.leaky_relu(x.double(), 0.01),
    lambda x: F.elu(x.double()),
    lambda x: torch.tanh(x.double()),
    lambda x: torch.sigmoid(x.double()),
    lambda x: F.softplus(x.double()),
    lambda x: torch.softmax(x.double(), -1),
)
