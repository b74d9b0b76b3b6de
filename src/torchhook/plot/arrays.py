"""Tensors, arrays and lists as plain tensors, and the range of nearly all of their values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ARRAY = "a tensor, an array or lists of real numbers"


def numbers(value: Any, argument: str, taken: str = ARRAY) -> Tensor:
    """`value` as a detached float64 tensor on the CPU; `taken` is what the argument may be, for the error.

    >>> numbers(torch.ones(2, dtype=torch.bfloat16, requires_grad=True), "x")
    tensor([1., 1.], dtype=torch.float64)
    >>> numbers("abc", "x")
    Traceback (most recent call last):
        ...
    TypeError: x must be a tensor, an array or lists of real numbers, not 'abc'
    """
    try:
        return _converted(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{argument} must be {taken}, not {value!r:.80}") from error


def finite(values: Tensor) -> Tensor:
    """`values` with NaN instead of infinities."""
    return values.masked_fill(~values.isfinite(), math.nan)


def share_below(values: Tensor, share: float) -> float:
    """The quantile `share` of the finite values, without interpolation; 0 if there are none.

    >>> share_below(torch.tensor([3.0, 1.0, math.nan, 2.0]), 0.5), share_below(torch.tensor([math.inf]), 0.5)
    (2.0, 0.0)
    """
    known = values[values.isfinite()].sort().values
    return float(known[round(share * (len(known) - 1))]) if len(known) else 0.0


def reach(values: Tensor) -> float:
    """The 99 % quantile of the absolute values, so that an outlier does not hide the others; never zero.

    >>> reach(torch.cat([torch.linspace(-1, 1, 1001), torch.tensor([1e6])])) < 1
    True
    >>> reach(torch.tensor([0.0] * 500 + [-3.0])), reach(torch.tensor([0.0, math.nan]))
    (3.0, 1.0)
    """
    return share_below(values.abs(), 0.99) or share_below(values.abs(), 1.0) or 1.0


def _converted(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)) and any(isinstance(item, Tensor) for item in value):
        return torch.stack([_converted(item) for item in value])
    if hasattr(value, "__array__") and not isinstance(value, Tensor):
        array = value.__array__()
        value = torch.as_tensor(
            array if array.dtype.kind == "c" else array.astype("float64")
        )  # a copy with plain strides
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64)
    tensor: Tensor = value.detach().cpu()
    if tensor.is_complex():
        raise TypeError("complex numbers cannot be ordered")
    return tensor.double()
