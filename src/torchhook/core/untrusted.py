"""Reads what others may have written: JSON becomes objects only after every name, type and number was checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_MOST = 2**63  # counts, lengths and sizes are below it
_LARGEST = 2**28  # bytes of a JSON file
_DEEPEST = 100  # objects and lists within one another
_DIGITS = 300  # of an integer: with more, it does not fit a float


def json_of(text: str | bytes) -> Any:
    """JSON as Python objects; raises a ValueError for what is nested too deeply, has a key twice, or is too large a
    number.

    >>> json_of('{"rows": 1, "rows": 2}')
    Traceback (most recent call last):
    ValueError: the key 'rows' is there twice
    """
    try:
        found = json.loads(text, object_pairs_hook=_object, parse_int=_whole)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if _is_deep(found):
        raise ValueError("its JSON is nested too deeply")
    return found


def json_in(file: Path) -> Any:
    """The JSON in a file, which must not be larger than any that torchhook writes."""
    with file.open("rb") as opened:
        text = opened.read(_LARGEST + 1)
    if len(text) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST >> 20} MiB")
    return json_of(text)


def built(kind: type[T], value: Any, name: str = "it") -> T:
    """An object of type `kind` from JSON; raises a ValueError that names the field which does not fit.

    `kind` is a dataclass, a container of what is allowed, or a simple type. Integers are counts, so they are not
    negative; objects whose keys are integers have them as strings, as JSON requires.

    >>> built(dict[int, tuple[str, ...]], {"3": ["a", "b"]})
    {3: ('a', 'b')}
    >>> built(tuple[int, ...], [4, -1], "shape")
    Traceback (most recent call last):
    ValueError: shape[1] must be a whole number from 0 to 9223372036854775807, not -1
    """
    found: T = _built(kind, value, name)
    return found


def _built(kind: Any, value: Any, name: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        options = [option for option in get_args(kind) if option is not NoneType]
        return None if value is None and len(options) < len(get_args(kind)) else _built(options[0], value, name)
    if origin is Literal:
        _require(value in get_args(kind), name, f"one of {', '.join(map(repr, get_args(kind)))}", value)
        return value
    if is_dataclass(kind):
        return _dataclass(kind, value, name)
    if origin is tuple:
        return _tuple(get_args(kind), value, name)
    if origin is dict:
        _require(isinstance(value, dict), name, "an object", value)
        keys, values = get_args(kind)
        return {_key(keys, key, name): _built(values, item, f"{name}[{key!r:.60}]") for key, item in value.items()}
    expected, fits = _SIMPLE[kind]
    _require(fits(value), name, expected, value)
    return kind(value)


def _dataclass(kind: Any, value: Any, name: str) -> Any:
    _require(isinstance(value, dict), name, "an object", value)
    hints, known = get_type_hints(kind), {field.name: field for field in fields(kind)}
    for key in value:
        if key not in known:
            raise ValueError(f"{name} has the unknown field {key!r:.60}")
    for key, field in known.items():
        if key not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{name} lacks the field {key!r}")
    return kind(
        **{key: _built(hints[key], item, key if name == "it" else f"{name}.{key}") for key, item in value.items()}
    )


def _tuple(kinds: tuple[Any, ...], value: Any, name: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), name, "a list", value)
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    _require(len(kinds) == len(value), name, f"a list of {len(kinds)}", value)
    return tuple(_built(kind, item, f"{name}[{at}]") for at, (kind, item) in enumerate(zip(kinds, value, strict=True)))


def _key(kind: Any, key: str, name: str) -> Any:
    if kind is not int:
        return key
    _require(key.isascii() and key.isdecimal() and len(key) < 20, name, "an object with whole numbers as keys", key)
    return int(key)


def _require(fits: bool, name: str, expected: str, value: Any) -> None:
    if not fits:
        raise ValueError(f"{name} must be {expected}, not {value!r:.80}")


def is_number(value: Any) -> bool:
    """Whether it is a number that fits a float: JSON may have integers of thousands of digits."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MOST)


_SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    int: (
        f"a whole number from 0 to {_MOST - 1}",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST,
    ),
    float: ("a number", is_number),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    str: ("a string", lambda value: isinstance(value, str)),
}


def _is_deep(value: Any) -> bool:
    """Whether a value is nested more deeply than any that torchhook writes: it may be too deep to be shown."""
    inside: list[Any] = [[value]]
    for _ in range(_DEEPEST + 1):
        parts = (part for whole in inside for part in (whole.values() if isinstance(whole, dict) else whole))
        inside = [part for part in parts if isinstance(part, (dict, list))]
        if not inside:
            return False
    return True


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError(f"it has a number of {len(digits):,} digits")
    return int(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r:.60} is there twice")
    return found
