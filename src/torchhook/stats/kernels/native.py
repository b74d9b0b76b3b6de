"""The kernels for the CPU, in C++, compiled on first use."""

from __future__ import annotations

import ctypes
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from torchhook.core.torch_internals import storage_address
from torchhook.stats.kernels.compiled import Compiled
from torchhook.stats.kernels.library import library


class Native(Compiled):
    """The kernels of ``native.cpp``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.library: Any = library(source("row.h") + source("native.cpp"))
        self.functions: dict[tuple[str, torch.dtype], Any] = {}
        if self._function("moments", torch.float32) is None:
            raise RuntimeError("the compiled library has no kernels")

    def has_run(self, kernel: str, state: Tensor, x: Tensor, dim: int | None = None) -> bool:
        if self.failed or type(x) is not Tensor:
            return False
        try:
            function = self.functions.get((kernel, x.dtype)) or self._function(kernel, x.dtype)
            if function is None:
                return False
            x = dense(x)
            sizes = (x.numel(),) if dim is None else laid_out(x, dim)
            if sizes[0]:
                function(address(x), *sizes, torch.get_num_threads(), state.data_ptr())
        except Exception as error:
            return self.give_up(error)
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
    """`x`, or a copy of it, whose values fill its memory without gaps, in any order."""
    x = x.resolve_neg()  # it may be negated lazily
    if x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense.default(x):
        return x
    return x.contiguous()


def laid_out(x: Tensor, dim: int) -> tuple[int, int, int]:
    """How a dense `x` is laid out in memory, in any order of dimensions: rows, units per row, values per unit.

    >>> laid_out(torch.zeros(2, 3, 5), 1), laid_out(torch.zeros(2, 5, 3), 2), laid_out(torch.zeros(0, 3), 1)
    ((2, 3, 5), (10, 3, 1), (0, 3, 1))
    """
    n, units = x.numel(), x.size(dim)
    inner = int(x.stride(dim)) if units > 1 else max(n, 1)
    return n // max(units * inner, 1), units, inner


def address(x: Tensor) -> int:
    """The address of the values of `x`. (Its ``data_ptr`` would end copy-on-write, as if one were to write there.)"""
    return storage_address(x) + int(x.storage_offset()) * x.element_size()


def source(name: str) -> str:
    """The text of a file in this folder."""
    return (files(__package__) / name).read_text()
