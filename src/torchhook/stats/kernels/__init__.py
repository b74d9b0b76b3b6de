"""The loops over all values, in three ways: plain torch, and compiled ones for the CPU and for NVIDIA GPUs."""

from __future__ import annotations

from functools import cache

import torch

from torchhook.core.text import warn
from torchhook.stats.kernels.plain import Plain


@cache
def kernels(device: torch.device) -> Plain:
    """The fastest ones that work for tensors on `device`."""
    try:
        if device.type == "cpu":
            from torchhook.stats.kernels.native import Native

            return Native()
        if device.type == "cuda" and torch.version.cuda:
            from torchhook.stats.kernels.gpu import GPU

            return GPU(device)
    except Exception as error:  # no compiler, a read-only cache, an unknown GPU: none of it may stop a training
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warn(f"statistics on {device} are computed by plain torch, which is slower: {reason:.200}")
    return Plain()
