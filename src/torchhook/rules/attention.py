"""Attention logits during a training: an error of ours becomes a warning and never stops it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from torchhook.core import attention
from torchhook.core.attention import Logits
from torchhook.core.text import warn

_FAR = 50.0  # a logit so far below the largest has no weight
_MOST = 2**27  # logits to recompute: fused kernels, which never hold them, are used where there are many


def without_masked(logits: Tensor) -> Tensor:
    """The logits (samples × heads × queries × keys) with -inf at masked keys: many models add -100 or -1e4 instead.

    Masked are keys that are far below the largest logit of their query in every head. Different heads that attend to
    one key each, however sharply, do not choose the same one.

    >>> logits = torch.zeros(1, 2, 1, 3)
    >>> logits[..., 1] -= 100
    >>> logits[0, 0, 0, 2] -= 100
    >>> without_masked(logits)[0, :, 0].tolist()
    [[0.0, -inf, -100.0], [0.0, -inf, 0.0]]
    """
    if logits.dim() < 4 or logits.shape[-3] < 2:
        return logits
    far = logits < logits.amax(-1, keepdim=True) - _FAR
    return logits.masked_fill(far.all(-3, keepdim=True), -torch.inf)


class GuardedAttending(attention.Attending):
    """While it is entered, passes the logits of every attention to `receive`, unless there are too many."""

    def __init__(self, receive: Callable[[Tensor], None]) -> None:
        def receive_all(logits: Logits) -> None:
            if logits.handed_out or prod(logits.shape) <= _MOST:
                receive(without_masked(logits.rows(0, logits.shape[-2])))

        super().__init__(receive_all)

    def look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._try(super().look, name, args, kwargs)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._try(super().follow, name, args, kwargs, result)

    def _try(self, action: Callable[..., None], name: str, *rest: Any) -> None:
        try:
            action(name, *rest)
        except Exception as error:
            warn(f"could not measure the attention of {name}: {error!r:.200}")
