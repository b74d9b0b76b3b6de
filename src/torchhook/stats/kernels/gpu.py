"""The kernels of NVIDIA GPUs, compiled on first use by the NVRTC that comes with torch."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchhook.core.torch_internals import compile_cuda, cuda_driver, modes_disabled, raw_stream
from torchhook.stats.kernels.native import address, dense, laid_out, source
from torchhook.stats.kernels.plain import Plain

_KINDS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_THREADS = 256
_LANES = 32
_WARPS = _THREADS // _LANES
_A_BLOCK = _THREADS * 4 * 16  # bytes that a block has on their way at a time
_BLOCKS = {"moments": 2, "histogram": 4}  # on each multiprocessor; so many are fastest
_WAVES = 32  # the same where they are small
_PLACES = 4096
_A_PLACE = 8  # bytes
_HIGHEST = 65_535  # blocks above one another


class GPU(Plain):
    """Those of ``gpu.cu``; for dtypes that it lacks, the plain ones."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.rows = self.processors * _BLOCKS["moments"]
        self.driver: Any = cuda_driver()
        self.source = source("row.h") + source("gpu.cu")
        self.kernels: dict[str, Any] = {}
        # Where the blocks of the moments look from, by the address of the state; where another state has lain before,
        # or there are too many, it is a wrong guess, which makes them slower and no more.
        self.slots: dict[int, int] = {}
        with modes_disabled():  # or under FakeTensorMode it would have no memory
            self.places = torch.zeros(_PLACES, self.rows, 2, device=device)
        self._kernel("moments<FLOAT32>")  # or fail now

    def moments(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the rows in `state`, each of which is one block's."""
        if _is_offered(x):
            slot = self.slots.setdefault(state.data_ptr(), len(self.slots) % _PLACES)
            self._through("moments", state, x, self.places.data_ptr() + slot * self.rows * _A_PLACE)
        else:
            super().moments(state, x)

    def settled(self, states: Tensor) -> Tensor:
        """The rows of each state as one."""
        rows = states.new_empty(len(states), states.size(2))
        if len(states):
            self._launch("settle", (len(states), 1), states.data_ptr(), states.size(1), rows.data_ptr(), threads=_LANES)
        return rows

    def histogram(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the bins in `state`."""
        if _is_offered(x):
            self._through("histogram", state, x)
        else:
            super().histogram(state, x)

    def channels(self, state: Tensor, x: Tensor, dim: int) -> None:
        """Add the values in `x` to the units in `state`, by way of sums."""
        if not _is_offered(x):
            super().channels(state, x, dim)
            return
        x = dense(x)
        rows, units, inner = laid_out(x, dim)
        if not rows:
            return
        kind, data, sums = _KINDS[x.dtype], address(x), torch.zeros_like(state)
        name, wide = ("along", units) if inner >= _LANES else ("across", -(-units * inner // _LANES))
        high = min(-(-rows // _WARPS), -(-self.processors * _WAVES // wide), _HIGHEST)
        self._launch(f"{name}<{kind}>", (wide, high), data, rows, units, inner, sums.data_ptr())
        places = data, units, inner, sums.data_ptr(), state.data_ptr()
        self._launch(f"merge_units<{kind}>", (-(-units // _THREADS), 1), *places)

    def _through(self, name: str, state: Tensor, x: Tensor, *more: int) -> None:
        """Run a kernel that sees all values of `x`, in whatever order."""
        x = dense(x)
        blocks = min(self.processors * _BLOCKS[name], -(-x.nbytes // _A_BLOCK)) or 1
        self._launch(f"{name}<{_KINDS[x.dtype]}>", (blocks, 1), address(x), x.numel(), state.data_ptr(), *more)

    def _launch(self, name: str, grid: tuple[int, int], *numbers: int, threads: int = _THREADS) -> None:
        """Run a kernel, whose arguments are all numbers of eight bytes."""
        kernel = self.kernels.get(name) or self._kernel(name)
        values = [ctypes.c_int64(number) for number in numbers]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(raw_stream(self.index))
        here = nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)
        with here:
            failed = self.driver.cuLaunchKernel(kernel.func, *grid, 1, threads, 1, 1, 0, stream, arguments, None)
        if failed:
            raise RuntimeError(f"the kernel {name} could not be launched (CUDA error {failed})")

    def _kernel(self, name: str) -> Any:
        with torch.cuda.device(self.index):
            kernel = self.kernels[name] = compile_cuda(self.source, name)
        return kernel


def _is_offered(x: Tensor) -> bool:
    return x.dtype in _KINDS and type(x) is Tensor
