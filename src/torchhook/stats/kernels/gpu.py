"""The kernels of NVIDIA GPUs, compiled on first use by the NVRTC that comes with torch."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from torchhook.stats.kernels.native import address, dense, source
from torchhook.stats.kernels.plain import Plain

_KINDS = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}
_THREADS = 256
_A_BLOCK = _THREADS * 4 * 16  # bytes that a block has on their way at a time
_BLOCKS = {"moments": 2, "histogram": 4}  # on each multiprocessor; so many are fastest


class GPU(Plain):
    """Those of ``gpu.cu``; for dtypes that it lacks, the plain ones."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.blocks = {name: processors * blocks for name, blocks in _BLOCKS.items()}
        self.rows = self.blocks["moments"]
        self.driver: Any = torch.cuda._utils._get_gpu_runtime_library()
        self.source = source("row.h") + source("gpu.cu")
        self.kernels: dict[tuple[str, torch.dtype], Any] = {}
        self._compile("moments", torch.float32)  # or fail now

    def moments(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the rows in `state`, each of which is one block's."""
        if x.dtype in _KINDS and type(x) is Tensor:
            self._launch("moments", state, x)
        else:
            super().moments(state, x)

    def histogram(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the bins in `state`."""
        if x.dtype in _KINDS and type(x) is Tensor:
            self._launch("histogram", state, x)
        else:
            super().histogram(state, x)

    def _launch(self, name: str, state: Tensor, x: Tensor) -> None:
        kernel = self.kernels.get((name, x.dtype)) or self._compile(name, x.dtype)
        x = dense(x)
        data, n, out = ctypes.c_void_p(address(x)), ctypes.c_int64(x.numel()), ctypes.c_void_p(state.data_ptr())
        arguments = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (data, n, out)))
        blocks = min(self.blocks[name], -(-x.nbytes // _A_BLOCK)) or 1
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(self.index))
        here = nullcontext() if torch.cuda.current_device() == self.index else torch.cuda.device(self.index)
        with here:
            failed = self.driver.cuLaunchKernel(kernel.func, blocks, 1, 1, _THREADS, 1, 1, 0, stream, arguments, None)
        if failed:
            raise RuntimeError(f"the {name} kernel could not be launched (CUDA error {failed})")

    def _compile(self, name: str, dtype: torch.dtype) -> Any:
        with torch.cuda.device(self.index):
            kernel = torch.cuda._compile_kernel(self.source, f"{name}<{_KINDS[dtype]}>")
        self.kernels[name, dtype] = kernel
        return kernel
