"""Attention logits during a training: an error of ours becomes a warning and never stops it."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from torchhook.core import attention
from torchhook.core.attention import Logits
from torchhook.core.text import warn

_MOST = 2**27  # logits to recompute: fused kernels, which never hold them, are used where there are many


class GuardedAttending(attention.Attending):
    """While it is entered, passes the logits of every attention to `receive`, unless there are too many."""

    def __init__(self, receive: Callable[[Tensor], None]) -> None:
        def receive_all(logits: Logits) -> None:
            if logits.handed_out or prod(logits.shape) <= _MOST:
                receive(logits.rows(0, logits.shape[-2]))

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
