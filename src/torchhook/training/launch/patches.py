"""Listening where torch offers no hook: functions that are called before or after one of torch's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any

Guard = Callable[[Callable[..., None]], Callable[..., None]]
"""Turns a function into one that never raises."""


@contextmanager
def replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """Let ``by(original)`` take the place of one of torch's functions."""
    original = vars(owner)[name]
    setattr(owner, name, by(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def patched(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call functions before or after one of torch's that offers no hook."""
    original = getattr(owner, name)

    @wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, around)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def unwarned(pattern: str) -> Iterator[None]:
    """Suppress the warnings that match `pattern`, which our own hooks would cause."""
    warnings.filterwarnings("ignore", pattern, UserWarning)
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError, AttributeError):  # the script may have changed the filters
            warnings.filters.remove(ours)  # type: ignore[attr-defined]  # a list, in fact
