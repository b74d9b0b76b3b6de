"""Seeing what attention looks at while a model trains: a fault of ours is told, and never stops that."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from torchhook.core import attention
from torchhook.core.attention import Logits
from torchhook.core.text import warn

_MOST = 2**27  # logits that are computed again: kernels that never hold them are used where they are many


class Attending(attention.Attending):
    """While it is entered, gives `tell` the logits of every attention that are not too many."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        def tell_all(logits: Logits) -> None:
            if logits.handed_out or prod(logits.shape) <= _MOST:
                tell(logits.rows(0, logits.shape[-2]))

        super().__init__(tell_all)

    def look(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._try(super().look, name, args, kwargs)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._try(super().follow, name, args, kwargs, result)

    def _try(self, action: Callable[..., None], name: str, *rest: Any) -> None:
        try:
            action(name, *rest)
        except Exception as error:
            warn(f"what {name} looks at is not measured, for that raised {error!r:.200}")
