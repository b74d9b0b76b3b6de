"""How far two tensors are apart, and how far their dtypes alone may carry them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchhook.core.torch_internals import CONVOLUTIONS, submodules

TINY = torch.finfo(torch.float64).tiny  # stands for zero where something is divided
_TF32 = 2.0**-10
_INT8 = 2.0**-5  # eight bits from the smallest number to the largest, which is a few times the usual one
_QUANTIZED = ("torch.ao.nn.", "torchao.")


@dataclass(frozen=True)
class Gap:
    """How far the tensor of one model is from that of the other.

    `rms` is the root of the mean square of the difference, `scale` that of the first tensor; `peak` is the largest
    difference over what the number there and the tensor as a whole amount to, so that one wrong number among millions
    shows. Numbers that are not finite count as equal where they are the same, as infinitely far apart elsewhere.
    """

    rms: float
    scale: float
    peak: float
    cosine: float
    worst: tuple[int, ...]
    values: tuple[float, float]

    @property
    def error(self) -> float:
        """The difference relative to the first tensor.

        >>> gap(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).error
        0.1
        """
        return self.rms / self.scale if self.scale else math.inf if self.rms else 0.0


def gap(a: Tensor, b: Tensor) -> Gap:
    """How far `b` is from `a`, a tensor of the same shape.

    >>> gap(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])).error
    0.0
    >>> gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])).worst
    (1,)
    """
    x, y = _numbers(a), _numbers(b)
    y = y.to(x.device)
    if not x.numel():
        return Gap(0.0, 0.0, 0.0, 1.0, (), (0.0, 0.0))
    d = _apart(x, y)
    x, y = (torch.where(t.isfinite(), t, 0.0) for t in (x, y))
    scale = rms(x)
    place = int((d / _weight(x, scale)).argmax())
    index = torch.unravel_index(torch.tensor(place), x.shape)
    worst = float(d.flatten()[place])
    return Gap(
        rms=rms(d),
        scale=scale,
        peak=worst / (abs(float(x.flatten()[place])) + scale + TINY),
        cosine=_cosine(x, y, scale),
        worst=tuple(int(number) for number in index) if worst else (),
        values=(_item(a, index), _item(b, index)),
    )


def precision(tensors: Iterable[Tensor], *modules: nn.Module) -> float:
    """The coarsest spacing of numbers just above 1 among `tensors` and what `modules` compute with; 0 of whole numbers.

    >>> precision([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])
    0.0078125
    """
    kept = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    own = [_own(module) for module in modules]
    return max([0.0, *own, *(spacing(tensor) for tensor in [*tensors, *kept])])


def between(tensors: Iterable[Tensor]) -> float:
    """The spacing of numbers that code outside of modules may have computed with, where that is coarser than theirs."""
    fast = torch.backends.cuda.matmul.allow_tf32
    return _TF32 if fast and any(one.is_cuda and one.dtype == torch.float32 for one in tensors) else 0.0


def floor(tensors: Iterable[Tensor]) -> float:
    """The smallest number above zero that the coarsest of `tensors` can hold.

    >>> floor([torch.ones(1), torch.ones(1, dtype=torch.float16)])
    5.960464477539063e-08
    """
    infos = [torch.finfo(tensor.dtype) for tensor in tensors if tensor.dtype.is_floating_point]
    return max((info.smallest_normal * info.eps for info in infos), default=0.0)


def apart(a: Tensor, b: Tensor) -> Tensor:
    """How far each number of `b` is from that of `a`; infinitely, if one of them alone is not finite.

    >>> apart(torch.tensor([1.0, torch.nan]), torch.tensor([3.0, torch.nan])).tolist()
    [2.0, 0.0]
    """
    x = _numbers(a)
    return _apart(x, _numbers(b).to(x.device))


def highest(differences: Tensor, a: Tensor, scale: float) -> float:
    """The largest of `differences` from `a`, a tensor of this scale, measured as in `Gap.peak`."""
    return float((differences / _weight(_numbers(a), scale).to(differences.device)).max())


def left(a: Tensor, b: Tensor, reach: Tensor, scale: float) -> tuple[float, float]:
    """`Gap.rms` and `Gap.peak` of what is left of the gap when each number may be off by `reach`."""
    gaps = apart(a, b)
    rest = (gaps - reach.nan_to_num(posinf=0.0).to(gaps.device)).clamp(min=0.0)
    return rms(rest), highest(rest, a, scale)


def spacing(tensor: Tensor) -> float:
    """The spacing of the numbers of this dtype just above 1; 0 of whole numbers, which have no rounding."""
    if tensor.is_quantized:
        return _INT8
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def comparable(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    """How many tensors, from the first on, have the same shape in both."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x.is_nested or y.is_nested or x.shape != y.shape or x.is_meta or y.is_meta:
            break
        count += 1
    return count


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has no others in it; those that a quantized one keeps its weights in do not count."""
    return not submodules(module) or _is_quantized(module)


def _is_quantized(module: nn.Module) -> bool:
    return type(module).__module__.startswith(_QUANTIZED)


def _own(module: nn.Module) -> float:
    """The precision of a module that computes with less than its dtype says."""
    if _is_quantized(module):
        return _INT8
    first = next(module.parameters(recurse=False), None)
    if first is None or first.device.type != "cuda" or first.dtype != torch.float32:
        return 0.0
    convolves = isinstance(module, CONVOLUTIONS)
    fast = torch.backends.cudnn.allow_tf32 if convolves else torch.backends.cuda.matmul.allow_tf32
    return _TF32 if fast else 0.0


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in double precision; the outermost of its dtype, which masks are made of, as infinite."""
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.cpu() if tensor.device.type == "mps" else tensor  # which has no double precision
    wide = tensor.double()
    if not tensor.dtype.is_floating_point:
        return wide
    edge = 0.99 * torch.finfo(tensor.dtype).max
    return torch.where(wide.abs() > edge, wide.sign() * math.inf, wide)


def _weight(x: Tensor, scale: float) -> Tensor:
    """What each difference is measured by: the number there, and the tensor as a whole."""
    return torch.where(x.isfinite(), x.abs(), 0.0) + scale + TINY


def _apart(x: Tensor, y: Tensor) -> Tensor:
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (y - x).abs()).nan_to_num(nan=math.inf)


def rms(x: Tensor) -> float:
    """The root of the mean square."""
    return float(torch.linalg.vector_norm(x)) / math.sqrt(x.numel())


def _cosine(x: Tensor, y: Tensor, scale: float) -> float:
    lengths = scale * rms(y) * x.numel()
    if not lengths:
        return 1.0 if scale == rms(y) else 0.0
    return max(-1.0, min(1.0, float((x * y).sum()) / lengths))


def _item(tensor: Tensor, index: tuple[Tensor, ...]) -> float:
    return float(_numbers(tensor)[tuple(int(number) for number in index)])
