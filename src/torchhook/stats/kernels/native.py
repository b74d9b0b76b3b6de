"""The kernels of the CPU, in C++, compiled on first use."""

from __future__ import annotations

import ctypes
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from torchhook.core.torch_internals import storage_address
from torchhook.stats.kernels.library import library
from torchhook.stats.kernels.plain import Plain


class Native(Plain):
    """Those of ``native.cpp``; for dtypes that it lacks, the plain ones."""

    def __init__(self) -> None:
        self.library: Any = library(source("row.h") + source("native.cpp"))
        self.functions: dict[tuple[str, torch.dtype], Any] = {}

    def moments(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the row `state`."""
        if not self._run("moments", state, x):
            super().moments(state, x)

    def histogram(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the bins in `state`."""
        if not self._run("histogram", state, x):
            super().histogram(state, x)

    def channels(self, state: Tensor, x: Tensor, dim: int) -> None:
        """Add the values in `x` to the units in `state`."""
        function = self.functions.get(("channels", x.dtype)) or self._function("channels", x.dtype)
        if function is None or type(x) is not Tensor:
            super().channels(state, x, dim)
            return
        x = dense(x)
        rows, units, inner = laid_out(x, dim)
        if rows:
            function(address(x), rows, units, inner, torch.get_num_threads(), state.data_ptr())

    def _run(self, name: str, state: Tensor, x: Tensor) -> bool:
        function = self.functions.get((name, x.dtype)) or self._function(name, x.dtype)
        if function is None or type(x) is not Tensor:
            return False
        x = dense(x)
        function(address(x), x.numel(), torch.get_num_threads(), state.data_ptr())
        return True

    def _function(self, name: str, dtype: torch.dtype) -> Any:
        function = getattr(self.library, f"{name}_{str(dtype).removeprefix('torch.')}", None)
        if function is not None:
            sizes = 3 if name == "channels" else 1
            function.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * sizes, ctypes.c_int, ctypes.c_void_p]
            function.restype = None
            self.functions[name, dtype] = function
        return function


def dense(x: Tensor) -> Tensor:
    """`x`, or a copy of it, whose values lie one after the other in memory; in which order is all the same."""
    x = x.resolve_neg()  # what is negated in name only
    if x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(x):
        return x
    return x.contiguous()


def laid_out(x: Tensor, dim: int) -> tuple[int, int, int]:
    """In whatever order the dimensions lie: how often all units follow one another, how many, and how many values each.

    >>> laid_out(torch.zeros(2, 3, 5), 1), laid_out(torch.zeros(2, 5, 3), 2), laid_out(torch.zeros(0, 3), 1)
    ((2, 3, 5), (10, 3, 1), (0, 3, 1))
    """
    n, units = x.numel(), x.size(dim)
    inner = int(x.stride(dim)) if units > 1 else max(n, 1)
    return n // max(units * inner, 1), units, inner


def address(x: Tensor) -> int:
    """Where the values of `x` lie. (To ask for its ``data_ptr`` would end a copy on write, for one may write there.)"""
    return storage_address(x) + int(x.storage_offset()) * x.element_size()


def source(name: str) -> str:
    """One of the files beside this one."""
    return (files(__package__) / name).read_text()
