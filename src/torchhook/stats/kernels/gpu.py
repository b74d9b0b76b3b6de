"""The kernels for NVIDIA GPUs, compiled on first use by the NVRTC that comes with torch."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchhook.core.torch_internals import compile_cuda, cuda_driver, modes_disabled, raw_stream
from torchhook.stats.kernels.compiled import Compiled
from torchhook.stats.kernels.native import address, dense, laid_out, source

_KINDS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_THREADS = 256
_LANES = 32
_WARPS = _THREADS // _LANES
_A_BLOCK = _THREADS * 4 * 16  # bytes that a block reads at a time
# Per multiprocessor: the fastest numbers for each alone; both together need the rows of the moments.
_BLOCKS = {"moments": 2, "histogram": 4, "moments_and_histogram": 2}
_WAVES = 32  # the same for channels, whose blocks are small
_PLACES = 4096
_A_PLACE = 8  # bytes
_HIGHEST = 65_535  # CUDA's limit for the second dimension of a grid


class GPU(Compiled):
    """The kernels of ``gpu.cu``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.index = device.index
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.rows = self.processors * _BLOCKS["moments"]
        self.driver: Any = cuda_driver()
        self.source = source("row.h") + source("gpu.cu")
        self.kernels: dict[str, Any] = {}
        # By the address of a state: where the blocks of its moments start to look. If the address is reused, or there
        # are too many states, that is a wrong guess, which only makes them slower.
        self.slots: dict[int, int] = {}
        with modes_disabled():  # or under FakeTensorMode it would have no memory
            self.places = torch.zeros(_PLACES, self.rows, 2, device=device)
        self._kernel("moments<FLOAT32>")  # fail now rather than later

    def has_run(self, kernel: str, state: Tensor, x: Tensor, dim: int | None = None) -> bool:
        if not self._takes(x):
            return False
        try:
            x = dense(x)
            if dim is not None:
                self._run_channels(state, x, dim)
            elif kernel == "moments":
                self._run_over_all(kernel, x, state.data_ptr(), self._place(state))
            else:
                self._run_over_all(kernel, x, state.data_ptr())
        except Exception as error:
            return self.give_up(error)
        return True

    def moments_and_histogram(self, moments: Tensor, bins: Tensor, x: Tensor) -> bool:
        if not self._takes(x):
            return False
        try:
            places = moments.data_ptr(), self._place(moments), bins.data_ptr()
            self._run_over_all("moments_and_histogram", dense(x), *places)
        except Exception as error:
            return self.give_up(error)
        return True

    def settled(self, states: Tensor) -> Tensor:
        """The rows of each state merged into one."""
        if self.failed:
            return super().settled(states)
        rows, grid = states.new_empty(len(states), states.size(2)), (len(states), 1)
        try:
            if len(states):
                self._launch("settle", grid, states.data_ptr(), states.size(1), rows.data_ptr(), threads=_LANES)
        except Exception as error:
            self.give_up(error)
            return super().settled(states)
        return rows

    def _takes(self, x: Tensor) -> bool:
        return not self.failed and x.dtype in _KINDS and type(x) is Tensor

    def _run_channels(self, state: Tensor, x: Tensor, dim: int) -> None:
        """Add up the values of each unit, then merge the sums into `state`."""
        rows, units, inner = laid_out(x, dim)
        if not rows:
            return
        kind, data, sums = _KINDS[x.dtype], address(x), torch.zeros_like(state)
        name, wide = ("along", units) if inner >= _LANES else ("across", -(-units * inner // _LANES))
        high = min(-(-rows // _WARPS), -(-self.processors * _WAVES // wide), _HIGHEST)
        self._launch(f"{name}<{kind}>", (wide, high), data, rows, units, inner, sums.data_ptr())
        places = data, units, inner, sums.data_ptr(), state.data_ptr()
        self._launch(f"merge_units<{kind}>", (-(-units // _THREADS), 1), *places)

    def _place(self, state: Tensor) -> int:
        """The address of the places of a state of moments."""
        slot = self.slots.setdefault(state.data_ptr(), len(self.slots) % _PLACES)
        return int(self.places.data_ptr()) + slot * self.rows * _A_PLACE

    def _run_over_all(self, name: str, x: Tensor, *addresses: int) -> None:
        """Run a kernel that visits all values of a dense `x`, in any order."""
        blocks = min(self.processors * _BLOCKS[name], -(-x.nbytes // _A_BLOCK)) or 1
        self._launch(f"{name}<{_KINDS[x.dtype]}>", (blocks, 1), address(x), x.numel(), *addresses)

    def _launch(self, name: str, grid: tuple[int, int], *numbers: int, threads: int = _THREADS) -> None:
        """Launch a kernel. All its arguments are numbers of eight bytes."""
        kernel = self.kernels.get(name) or self._kernel(name)
        values = [ctypes.c_int64(number) for number in numbers]
        arguments = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        stream = ctypes.c_void_p(raw_stream(self.index))
        here = nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)
        with here:
            failed = self.driver.cuLaunchKernel(kernel.func, *grid, 1, threads, 1, 1, 0, stream, arguments, None)
        if failed:
            raise RuntimeError(f"could not launch the kernel {name} (CUDA error {failed})")

    def _kernel(self, name: str) -> Any:
        with torch.cuda.device(self.index):
            kernel = self.kernels[name] = compile_cuda(self.source, name)
        return kernel
