"""Finds the GradScaler that multiplies the loss. There is no API for it, but the caller of a step is on the stack."""

from __future__ import annotations

import sys
from types import FrameType

from torch.amp import GradScaler

from torchhook.core.instances import instances
from torchhook.core.torch_internals import SCALER_STEPS, scale_of


def only_scaler() -> GradScaler | None:
    """The GradScaler that has scaled something, if there is exactly one: before the first step, no more is known."""
    used = [scaler for scaler in instances(GradScaler) if scaler.is_enabled() and scale_of(scaler) is not None]
    return used[0] if len(used) == 1 else None


def scaler_that_steps() -> GradScaler | None:
    """The GradScaler that called the optimizer, if one did."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(16):
        if frame is None:
            break
        if frame.f_code in SCALER_STEPS:  # f_locals of any other frame would keep its variables alive
            scaler: GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None
