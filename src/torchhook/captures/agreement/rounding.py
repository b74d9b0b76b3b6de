"""The difference of two tensors, and how much of it the rounding of their dtypes can explain."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

TINY = torch.finfo(torch.float64).tiny  # added to divisors that may be zero
TF32 = 2.0**-10
INT8 = 2.0**-5  # eight bits span the range from the smallest to the largest value, several times a typical one


@dataclass(frozen=True)
class Gap:
    """The difference between a tensor of one model and the same tensor of another.

    `rms` is the root mean square of the difference and `scale` that of the first tensor. `peak` is the largest
    difference of one element, relative to that element plus `scale`, so that one wrong element among millions shows;
    `worst` is its index, and `values` has both of its values. Non-finite elements are equal if they are the same, and
    infinitely far apart otherwise.
    """

    rms: float
    scale: float
    peak: float
    cosine: float
    worst: tuple[int, ...]
    values: tuple[float, float]

    @property
    def error(self) -> float:
        """The RMS of the difference relative to that of the first tensor.

        >>> gap(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])).error
        0.1
        """
        return self.rms / self.scale if self.scale else math.inf if self.rms else 0.0


class Absent(ABC):
    """Stands for a tensor whose values are not here, but whose distance from another one can still be told."""

    shape: torch.Size
    dtype: torch.dtype
    is_cuda = is_meta = is_nested = is_quantized = False
    requires_grad = False

    @abstractmethod
    def gap(self, other: Tensor | Absent, is_first: bool) -> Gap:
        """The distance from `other`, of the same shape; `is_first` if the other one's is measured relative to this."""

    def is_complex(self) -> bool:
        """Whether its numbers are complex."""
        return self.dtype.is_complex

    def is_floating_point(self) -> bool:
        """Whether its numbers are floating-point."""
        return self.dtype.is_floating_point

    def dim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of its values."""
        return self.shape.numel()


def gap(a: Tensor, b: Tensor) -> Gap:
    """The difference of `b` from `a`, a tensor of the same shape.

    >>> gap(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan])).error
    0.0
    >>> gap(torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan])).worst
    (1,)
    """
    if isinstance(a, Absent) or isinstance(b, Absent):
        return a.gap(b, is_first=True) if isinstance(a, Absent) else cast("Absent", b).gap(a, is_first=False)
    given = _numbers(a)
    if not given.numel():
        return Gap(0.0, 0.0, 0.0, 1.0, (), (0.0, 0.0))
    x = torch.where(given.isfinite(), given, 0.0)
    scale = rms(x)
    if _are_equal(a, b):  # most are, in a copy that was changed in one place
        first = float(given.flatten()[0])
        return Gap(0.0, scale, 0.0, 1.0, (), (first, first))
    other = _numbers(b).to(given.device).reshape(given.shape)
    d = _difference(given, other)
    y = torch.where(other.isfinite(), other, 0.0)
    farthest = int((d / _weight(x, scale)).argmax())
    index = torch.unravel_index(torch.tensor(farthest), x.shape)
    worst = float(d.flatten()[farthest])
    return Gap(
        rms=rms(d),
        scale=scale,
        peak=worst / (abs(float(x.flatten()[farthest])) + scale + TINY),
        cosine=_cosine(x, y, scale),
        worst=tuple(int(number) for number in index) if worst else (),
        values=(float(given.flatten()[farthest]), float(other.flatten()[farthest])),
    )


def precision(tensors: Iterable[Tensor]) -> float:
    """The coarsest machine epsilon among `tensors`; 0 for integers.

    >>> precision([torch.ones(1), torch.ones(1, dtype=torch.bfloat16)])
    0.0078125
    """
    return max(map(spacing, tensors), default=0.0)


def matmul_precision(tensors: Iterable[Tensor]) -> float:
    """The machine epsilon of TF32 if code outside of modules may have computed `tensors` with it, else 0."""
    fast = torch.backends.cuda.matmul.allow_tf32
    return TF32 if fast and any(one.is_cuda and one.dtype == torch.float32 for one in tensors) else 0.0


def floor(tensors: Iterable[Tensor]) -> float:
    """The smallest positive number that the coarsest dtype of `tensors` can represent.

    >>> floor([torch.ones(1), torch.ones(1, dtype=torch.float16)])
    5.960464477539063e-08
    """
    infos = [torch.finfo(tensor.dtype) for tensor in tensors if tensor.dtype.is_floating_point]
    return max((info.smallest_normal * info.eps for info in infos), default=0.0)


def difference(a: Tensor, b: Tensor) -> Tensor:
    """The absolute difference of `a` and `b`, element by element; infinite where only one of them is finite.

    >>> difference(torch.tensor([1.0, torch.nan]), torch.tensor([3.0, torch.nan])).tolist()
    [2.0, 0.0]
    """
    x = _numbers(a)
    return _difference(x, _numbers(b).to(x.device).reshape(x.shape))


def peak_of(differences: Tensor, a: Tensor, scale: float) -> float:
    """The largest of some absolute `differences` from `a`, relative to its elements and `scale` as in `Gap.peak`."""
    return float((differences / _weight(_numbers(a), scale).to(differences.device)).max())


def unexplained(a: Tensor, b: Tensor, reach: Tensor, scale: float) -> tuple[float, float]:
    """`Gap.rms` and `Gap.peak` of what remains of the difference once `reach` is subtracted from each element."""
    apart = difference(a, b)
    rest = (apart - reach.nan_to_num(posinf=0.0).to(apart.device)).clamp(min=0.0)
    return rms(rest), peak_of(rest, a, scale)


def spacing(tensor: Tensor) -> float:
    """The machine epsilon of a tensor's dtype: the spacing of numbers just above 1; 0 for integers, which are exact."""
    if tensor.is_quantized:
        return INT8
    dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def comparable(a: Sequence[Tensor], b: Sequence[Tensor]) -> int:
    """How many tensors at the start of both sequences have shapes that can be compared."""
    count = 0
    for x, y in zip(shapes_of(a), shapes_of(b), strict=False):
        if not are_alike(x, y):
            break
        count += 1
    return count


def are_alike(x: tuple[int, ...] | None, y: tuple[int, ...] | None) -> bool:
    """Whether shapes are the same, or are so once samples and positions, which some engines keep in one, are one.

    >>> are_alike((2, 3, 8), (6, 8)), are_alike((2, 3), (6,)), are_alike((2, 3, 8), (3, 2, 8))
    (True, True, False)
    """
    if x is None or y is None or x == y:
        return x is not None and x == y
    sizes = sorted((x, y), key=len)
    return len(x) != len(y) and math.prod(x) == math.prod(y) and (len(sizes[0]) == 1 or x[-1:] == y[-1:])


def shapes_of(tensors: Sequence[Tensor]) -> list[tuple[int, ...] | None]:
    """The shapes of tensors, without reading those on disk; None for what has no plain shape or no values."""
    known: list[tuple[int, ...] | None] | None = getattr(tensors, "shapes", None)
    if known is not None:
        return known
    return [None if tensor.is_nested or tensor.is_meta else tuple(tensor.shape) for tensor in tensors]


def _numbers(tensor: Tensor) -> Tensor:
    """A tensor in float64, with the extreme values of its dtype, which masks use, as infinities."""
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.cpu() if tensor.device.type == "mps" else tensor  # which does not support float64
    wide = tensor.double()
    if not tensor.dtype.is_floating_point:
        return wide
    edge = 0.99 * torch.finfo(tensor.dtype).max
    return torch.where(wide.abs() > edge, wide.sign() * math.inf, wide)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same in every bit, as far as that is quickly told."""
    plain = a.layout == b.layout == torch.strided and not (a.is_quantized or b.is_quantized)
    return plain and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _weight(x: Tensor, scale: float) -> Tensor:
    """What the difference of each element is relative to: that element, and the scale of the tensor."""
    return torch.where(x.isfinite(), x.abs(), 0.0) + scale + TINY


def _difference(x: Tensor, y: Tensor) -> Tensor:
    same = (x == y) | (x.isnan() & y.isnan())
    return torch.where(same, 0.0, (y - x).abs()).nan_to_num(nan=math.inf)


def rms(x: Tensor) -> float:
    """The root mean square."""
    return float(torch.linalg.vector_norm(x)) / math.sqrt(x.numel())


def _cosine(x: Tensor, y: Tensor, scale: float) -> float:
    lengths = scale * rms(y) * x.numel()
    if not lengths:
        return 1.0 if scale == rms(y) else 0.0
    return max(-1.0, min(1.0, float((x * y).sum()) / lengths))
