"""Objects that are shown as the call that made them: ``Record(copy='clone')``, ``ablate(channels=[1])``.

A class whose objects users make themselves is `Shown`; a function that makes one for them is decorated with `maker`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from torchhook.core.selection import Selector
from torchhook.core.text import shape_of

if TYPE_CHECKING:
    from typing_extensions import Self

_F = TypeVar("_F", bound=Callable[..., Any])
_PLAIN = (bool, int, float, complex, type(None), slice, torch.dtype, torch.device, torch.Size, Selector)
_FUNCTIONS = (type, types.FunctionType, types.MethodType)
_MOST = 6  # items of a container


class Shown:
    """An object whose repr is the call that made it. It keeps the text alone, not the arguments.

    >>> class Scaling(Shown):
    ...     def __init__(self, factor, where=None):
    ...         pass
    >>> Scaling(torch.ones(2, 3), where=[1])
    Scaling(tensor 2×3, where=[1])
    """

    _shown_as: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_shown_as", _call(cls.__name__, args, kwargs))  # some are frozen
        return made

    def __repr__(self) -> str:
        return self._shown_as


def maker(function: _F) -> _F:
    """A decorator for a function that makes something `Shown`.

    >>> @maker
    ... def scaling(factor, **options):
    ...     return Shown()
    >>> scaling(2.0, at=0)
    scaling(2.0, at=0)
    """

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        made._shown_as = _call(function.__name__, args, kwargs)
        return made

    return make  # type: ignore[return-value]  # the same signature, which wraps copies


def short(value: Any) -> str:
    """A value in a few words: numbers and texts as they are, of tensors the shape, of all else the name.

    >>> short([1, torch.ones(2), torch.relu, torch.nn.ReLU()]), short({"mean": len})
    ('[1, tensor 2, relu, ReLU]', '{mean: len}')
    """
    if isinstance(value, Tensor):
        return f"tensor {shape_of(value)}"
    if isinstance(value, (str, bytes, PurePath)):
        return repr(value) if len(str(value)) <= 60 else f"{repr(value)[:57]}…"
    if isinstance(value, Shown):
        return value._shown_as
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, types.BuiltinFunctionType):  # the qualified name of torch's is not what one writes
        return value.__name__
    if isinstance(value, _FUNCTIONS):
        return value.__qualname__
    if isinstance(value, functools.partial):
        return short(value.func)
    if type(value) is dict:
        return "{" + _few(f"{key}: {short(item)}" for key, item in value.items()) + "}"
    if type(value) in (list, tuple, set, frozenset):
        listed = _few(map(short, value))
        return f"[{listed}]" if isinstance(value, list) else f"({listed}{',' * (len(value) == 1)})"
    return type(value).__name__


def _call(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return f"{name}({', '.join([*map(short, args), *(f'{key}={short(value)}' for key, value in kwargs.items())])})"


def _few(texts: Iterable[str]) -> str:
    listed = list(texts)
    more = [f"… {len(listed) - _MOST} more"] if len(listed) > _MOST else []
    return ", ".join([*listed[:_MOST], *more])
