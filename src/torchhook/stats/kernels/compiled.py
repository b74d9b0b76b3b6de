"""What all compiled kernels share: plain torch takes over what they cannot do, and everything once one has failed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor

from torchhook.core.text import warn
from torchhook.stats.kernels.plain import Plain


class Compiled(Plain, ABC):
    """Kernels that were compiled for one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.failed = False

    @abstractmethod
    def has_run(self, kernel: str, state: Tensor, x: Tensor, dim: int | None = None) -> bool:
        """Add the values in `x` to `state` with a compiled kernel, if there is one for them.

        A kernel that raises has to leave `state` as it was, and calls `give_up`.
        """

    def moments(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the moments in `state`."""
        if not self.has_run("moments", state, x):
            super().moments(state, x)

    def histogram(self, state: Tensor, x: Tensor) -> None:
        """Add the values in `x` to the bins in `state`."""
        if not self.has_run("histogram", state, x):
            super().histogram(state, x)

    def channels(self, state: Tensor, x: Tensor, dim: int) -> None:
        """Add the values in `x` to the units in `state`."""
        if not self.has_run("channels", state, x, dim):
            super().channels(state, x, dim)

    def give_up(self, error: Exception) -> Literal[False]:
        """Use plain torch from now on, because of `error`."""
        self.failed = True
        warn_of_plain(self.device, error)
        return False


def warn_of_plain(device: torch.device, error: Exception) -> None:
    """Say why plain torch is used. Never raises, not even where warnings are errors: the statistic must be updated."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    with suppress(UserWarning):
        warn(f"statistics on {device} are computed by plain torch, which is slower: {reason:.200}")
