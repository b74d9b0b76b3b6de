"""The loops over all values, in three versions: plain torch, C++ for the CPU, and CUDA for NVIDIA GPUs."""

from __future__ import annotations

from functools import cache

import torch

from torchhook.stats.kernels.compiled import warn_of_plain
from torchhook.stats.kernels.plain import Plain


@cache
def kernels(device: torch.device) -> Plain:
    """The fastest kernels that work for tensors on `device`: plain torch where the compiled ones cannot be built."""
    try:
        if device.type == "cpu":
            from torchhook.stats.kernels.native import Native

            return Native(device)
        if device.type == "cuda" and torch.version.cuda:
            from torchhook.stats.kernels.gpu import GPU

            return GPU(device)
    except Exception as error:  # no compiler, a read-only cache, an unknown GPU, another torch: no reason to stop
        warn_of_plain(device, error)
    return Plain()
