"""Old names of arguments and methods: they work for one more release, with a warning that names the new one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torchhook.core.text import user_level

_F = TypeVar("_F", bound=Callable[..., Any])
New = str | tuple[str, Callable[[Any], Any]]
"""The new name of an argument, and what turns an old value into a new one if they differ."""


def renamed(**arguments: New) -> Callable[[_F], _F]:
    """A decorator for functions whose keyword `arguments` had other names: old name → new name.

    >>> @renamed(layer="sites", max_mb=("max_bytes", lambda mib: mib * 2**20))
    ... def look(sites=None, max_bytes=0):
    ...     return sites, max_bytes
    >>> with warnings.catch_warnings(record=True) as said:
    ...     warnings.simplefilter("always")
    ...     look(layer="conv1")
    ('conv1', 0)
    >>> print(said[0].message)
    look(layer=...) is now look(sites=...); the old name will go in the next release
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in arguments.keys() & kwargs.keys():
                name = call.__qualname__.removesuffix(".__init__")
                new, convert = _parts(arguments[old])
                if new in kwargs:
                    raise TypeError(f"{name}() got both {new}= and its old name {old}=; pass {new}= alone")
                _deprecated(f"{name}({old}=...) is now {name}({new}=...)")
                kwargs[new] = convert(kwargs.pop(old))
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]  # the same signature, which wraps copies

    return decorate


def old_method(new: str) -> Callable[..., Any]:
    """A method that warns and calls the one that is called `new` now."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        _deprecated(f"this method of {type(self).__name__} is now called {new}()")
        return getattr(self, new)(*args, **kwargs)

    method.__doc__ = f"The old name of `{new}`."
    return method


def _parts(new: New) -> tuple[str, Callable[[Any], Any]]:
    return (new, lambda value: value) if isinstance(new, str) else new


def _deprecated(what: str) -> None:
    message = f"{what}; the old name will go in the next release"
    warnings.warn(message, DeprecationWarning, stacklevel=user_level())
