"""Whether the weights of a model are those that it was made with: a picture of noise looks like an answer.

Nothing is said unless it is sure. Training leaves traces that a fresh model cannot have: norms whose weights differ
from one another or that have seen batches, biases that are not constant and not within the bounds of torch's default,
matrices with values beyond the bounds of a uniform distribution, or with rows or columns of unequal size. A short
training may leave none in matrices that were drawn from a normal distribution, so these alone prove nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from torchhook.core.model_state import parts
from torchhook.core.text import warn
from torchhook.core.torch_internals import own_buffers, own_parameters, version_of

_FEW = 1000  # weights in matrices: with fewer, noise cannot be told from what was learned
_MOST = 1 << 18  # values of one matrix that are looked at
_CHANGED = 0.1  # of the layers: with more, the model was trained, perhaps except for a new head
_UNIFORM = 2.1  # kurtosis: 1.8 of a uniform distribution, 2.37 of a normal one cut at two deviations, 3 of a whole one
_HEAVY = 4.0  # kurtosis that no initialisation has
_SIGMAS = 6.0  # by which chance may explain a deviation

_LOOKED_AT = 16  # modules of a trained model that show whether it was made untrained since

State = tuple[tuple[int, ...], tuple[int, ...], list[float]]
_judged: WeakKeyDictionary[nn.Module, tuple[State, bool]] = WeakKeyDictionary()  # since it takes longer than a forward


def warn_of_untrained(model: nn.Module, modules: list[nn.Module] | None = None) -> None:
    """Warn if the weights of `model`, which has these `modules`, are as they were drawn at its creation.

    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warn_of_untrained(nn.Linear(64, 64))
    >>> print(said[0].message)
    the weights of this Linear look untrained (nearly every layer is as it was initialised), so the result explains \
noise; load trained weights first (torchhook explain takes --weights FILE)
    """
    modules, known = parts(model) if modules is None else modules, _judged.get(model)
    if known is None or known[0] != _state_of(_telling(modules, known[1])):
        verdict = is_untrained(model)
        known = _judged[model] = _state_of(_telling(modules, verdict)), verdict
    if known[1]:
        warn(
            f"the weights of this {type(model).__name__} look untrained (nearly every layer is as it was initialised),"
            " so the result explains noise; load trained weights first (torchhook explain takes --weights FILE)"
        )


def _telling(modules: list[nn.Module], verdict: bool) -> list[nn.Module]:
    """The modules to look at: some of a trained model, in which nearly all would have to change, else all."""
    return modules if verdict else modules[:: 1 + len(modules) // _LOOKED_AT]


def _state_of(modules: list[nn.Module]) -> State:
    """What differs once weights were loaded or trained: which tensors they are, how often each was written to, a value.

    The value is for writes that are not counted: through ``.data``, and to tensors made in inference_mode.
    """
    own = [tensors for part in modules for tensors in (own_parameters(part), own_buffers(part))]
    tensors = [tensor for some in own for tensor in some.values() if tensor is not None]
    try:
        writes = tuple(map(version_of, tensors))
    except RuntimeError:  # made in inference_mode
        writes = ()
    matrices = (tensor for tensor in tensors if _is_readable(tensor) and tensor.dim() > 1)
    return tuple(map(id, tensors)), writes, [float(one.detach()[(0,) * one.dim()]) for one in islice(matrices, 1)]


@torch.no_grad()
def is_untrained(model: nn.Module) -> bool:
    """Whether nearly all layers are as an initialisation leaves them; False if there are too few weights to say."""
    layers = list(_layers(model))
    if sum(weight.numel() for _, weight in layers if weight.dim() > 1) < _FEW:
        return False
    changed, most, is_sure = 0, _CHANGED * len(layers), False
    for layer, weight in layers:
        fresh = _is_fresh(layer, weight)
        changed, is_sure = changed + (fresh is False), is_sure or fresh is True
        if changed > most:
            return False
    return is_sure


def _layers(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """Each module that has weights of its own, with each of them; shared ones once."""
    seen = set()
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if "weight" in name and _is_readable(weight) and weight not in seen:
                seen.add(weight)
                yield module, weight.detach()


def _is_readable(weight: Tensor) -> bool:
    """Whether it is a plain tensor of real numbers: not a shard, not sparse, not without memory."""
    if type(weight) not in (nn.Parameter, Tensor) or weight.layout != torch.strided or weight.device.type == "meta":
        return False
    return weight.is_floating_point() and weight.numel() > 1


def _is_fresh(layer: nn.Module, weight: Tensor) -> bool | None:
    """Whether a layer is as an initialisation leaves it; None if it may be, but training may have left it so, too."""
    biases = [bias for name, bias in layer.named_parameters(recurse=False) if "bias" in name and bias.numel() > 1]
    is_zero = bool(biases) and all(map(_is_constant, biases))
    if weight.dim() < 2:
        return _is_constant(weight) and not _has_seen_batches(layer) and (is_zero or not biases)
    bound = 1 / math.sqrt(layer.hidden_size if isinstance(layer, nn.RNNBase) else weight[0].numel())
    if not is_zero and any(float(bias.abs().amax()) > bound * _rounding(bias) for bias in biases):
        return False
    noise = _is_noise(weight, bound)
    return True if is_zero and noise is None else noise


def _has_seen_batches(norm: nn.Module) -> bool:
    """Whether a batch norm has statistics of data."""
    mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
    return any(isinstance(value, Tensor) and not _is_constant(value) for value in (mean, var))


def _is_constant(values: Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def _is_noise(weight: Tensor, bound: float) -> bool | None:
    """Whether the values of a matrix were drawn independently from one distribution; None if that is only likely."""
    rows = weight.flatten(1)[: max(2, _MOST // weight[0].numel())].float()
    rows = rows[rows.any(1)]  # without the padding of an embedding
    if not rows.numel() or _is_constant(rows):
        return None
    square = rows.square()
    variance = float(square.mean())
    kurtosis = float(square.square().mean()) / variance**2
    if not kurtosis < _HEAVY or abs(float(rows.mean())) > _SIGMAS * math.sqrt(variance / rows.numel()):
        return False
    if kurtosis < _UNIFORM and rows.numel() >= _FEW:
        return _fills(float(rows.abs().amax()), bound, weight)
    spread = math.sqrt(kurtosis - 1)  # of a square, in units of its mean
    is_even = all(_are_alike(square.mean(dim) / variance, spread / math.sqrt(rows.shape[dim])) for dim in (0, 1))
    return None if is_even else False


def _fills(largest: float, bound: float, weight: Tensor) -> bool:
    """Whether the largest value is that of a uniform distribution that an initialisation of torch draws from."""
    fan_out, fan_in = weight.shape[0] * weight[0][0].numel(), weight[0].numel()
    known = (bound, *(math.sqrt(6 / fan) for fan in (fan_in, fan_out, fan_in + fan_out)))
    return any(0.98 * one < largest <= one * _rounding(weight) for one in known)


def _rounding(values: Tensor) -> float:
    """By how much a value at a bound may exceed it in this dtype."""
    return 1 + torch.finfo(values.dtype).eps


def _are_alike(sizes: Tensor, deviation: float) -> bool:
    """Whether the mean squares of rows, or of columns, differ by no more than chance explains."""
    count = len(sizes)
    if count < 2:
        return True
    return float((sizes - 1).square().mean()) < deviation**2 * (1 + _SIGMAS * math.sqrt(2 / count))
