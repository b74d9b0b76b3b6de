"""Dropout that is active although the model is in eval mode: a function that was not told of the mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from torchhook.core.text import user_line

_FUNCTIONS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ATTENTION = "scaled_dot_product_attention"


class ActiveDropout(TorchFunctionMode):
    """Notes the dropouts that drop something inside the block: the line of each, and the path of the module it is in.

    >>> import torch
    >>> with ActiveDropout(nn.Dropout().eval()) as seen:
    ...     _ = nn.functional.dropout(torch.ones(2), training=False), nn.functional.dropout(torch.ones(2))
    >>> len(seen.found)
    1
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self._paths = {id(module): path for path, module in model.named_modules()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if drops(func, args, kwargs or {}):
            self.found.setdefault(user_line(), self._path())
        return func(*args, **(kwargs or {}))

    def _path(self) -> str:
        """The innermost module whose method is being called."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path: str | None = self._paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back
        return ""


def drops(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a function drops something.

    >>> drops(nn.functional.dropout, (), {"p": 0.5, "training": False})
    False
    """
    name = getattr(function, "__name__", "")
    if name == _ATTENTION:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    if name not in _FUNCTIONS:
        return False
    share = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return bool(share and training)
