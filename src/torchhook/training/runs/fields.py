"""The numbers of a `Summary`, computed for many states of moments at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace

from torch import Tensor

from torchhook.stats.kernels.plain import FIELDS

WIDTH = len(FIELDS)
"""The length of a state of `Moments`."""


def field_of(states: Tensor, name: str) -> Tensor:
    """A field of `Summary` for states along the last dimension; NaN where there were no values.

    >>> import torch
    >>> from torchhook.stats.kernels.plain import moments_of
    >>> states = torch.stack([moments_of(torch.tensor([1.0, 3.0])), moments_of(torch.tensor([5.0]))])
    >>> field_of(states, "mean").tolist(), field_of(states, "std").tolist()
    ([2.0, 5.0], [1.4142135623730951, nan])
    """
    row = SimpleNamespace(**dict(zip(FIELDS, states.unbind(-1), strict=True)))
    row.nonfinite = row.nan + row.posinf + row.neginf
    row.n = row.count - row.nonfinite
    row.variance = row.m2 / row.n
    return _FORMULAS[require_field(name)](row).where(row.count > 0, math.nan)


def require_field(name: str, argument: str = "field") -> str:
    """`name`, if there is such a field; else raise."""
    if name not in _FORMULAS:
        raise ValueError(f"{argument} must be one of {', '.join(_FORMULAS)}, not {name!r}")
    return name


def _known(row: SimpleNamespace, values: Tensor) -> Tensor:
    return values.where(row.n > 0, math.nan)


def _power(row: SimpleNamespace, values: Tensor) -> Tensor:
    square = row.variance * row.variance
    return values.where(square > 0, math.nan)


_FORMULAS: dict[str, Callable[[SimpleNamespace], Tensor]] = {
    "count": lambda row: row.count,
    "mean": lambda row: _known(row, row.mean),
    "std": lambda row: (row.m2 / (row.n - 1)).sqrt().where(row.n > 1, math.nan),
    "min": lambda row: _known(row, row.min),
    "max": lambda row: _known(row, row.max),
    "l2": lambda row: _known(row, (row.m2 + row.n * row.mean * row.mean).sqrt()),
    "abs_mean": lambda row: _known(row, row.abs_sum / row.n),
    "zero_fraction": lambda row: row.zeros / row.count,
    "nonfinite": lambda row: row.nonfinite,
    "nan": lambda row: row.nan,
    "posinf": lambda row: row.posinf,
    "neginf": lambda row: row.neginf,
    "skewness": lambda row: _power(row, row.m3 / row.n / (row.variance * row.variance.sqrt())),
    "kurtosis": lambda row: _power(row, row.m4 / row.n / (row.variance * row.variance)),
}

NAMES = tuple(_FORMULAS)
"""The names of all fields."""
