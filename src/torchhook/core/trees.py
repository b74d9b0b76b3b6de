"""Values as they flow between modules: tensors inside tuples, lists, dicts and dataclasses.

`leaves` finds the tensors with their addresses, `mapped` puts others in their place and keeps every
container's type (namedtuples, ``ModelOutput``, ``PackedSequence``, …). An object of any other kind
is opaque: it is passed along as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

Address = tuple[Any, ...]
"""The keys that lead to a leaf: ``()`` for a bare tensor, ``(1, "h")`` for ``value[1]["h"]``."""


class Arguments(NamedTuple):
    """What a module was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def unwrapped(self) -> Any:
        """The one positional argument, or all of them, or, where there are none, the keywords."""
        if len(self.args) == 1:
            return self.args[0]
        return self.args or self.kwargs


def leaves(value: Any, kind: type = Tensor) -> Iterator[tuple[Address, Any]]:
    """The leaves of type `kind` in `value`, depth first, each with its address.

    >>> import torch
    >>> [address for address, _ in leaves({"a": torch.ones(1), "b": (1, torch.ones(1))})]
    [('a',), ('b', 1)]
    """
    if isinstance(value, kind):
        yield (), value
        return
    for key, item in _items(value):
        for address, leaf in leaves(item, kind):
            yield (key, *address), leaf


def mapped(change: Callable[[Any], Any], value: Any, kind: type = Tensor) -> Any:
    """`value` with every leaf of type `kind` replaced by ``change(leaf)``, containers kept in type.

    >>> import torch
    >>> mapped(lambda t: t.shape, [torch.ones(2), "text"])
    [torch.Size([2]), 'text']
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple):
        items = (mapped(change, item, kind) for item in value)
        make = getattr(type(value), "_make", type(value))  # namedtuples have _make
        return make(items)
    if type(value) is list:
        return [mapped(change, item, kind) for item in value]
    if type(value) is dict:
        return {key: mapped(change, item, kind) for key, item in value.items()}
    if not _is_container(value):
        return value
    twin = copy.copy(value)
    put: Callable[[Any, Any], None]
    if dataclasses.is_dataclass(value) and not isinstance(value, Mapping):
        put = lambda key, item: object.__setattr__(twin, key, item)  # noqa: E731 (frozen ones too)
    else:
        put = twin.__setitem__
    for key, item in _items(value):
        put(key, mapped(change, item, kind))
    return twin


def nbytes(value: Any) -> int:
    """The bytes that the tensors in `value` hold."""
    return sum(tensor.nbytes for _, tensor in leaves(value))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return ()


def _is_container(value: Any) -> bool:
    if isinstance(value, (list, Mapping)):
        return hasattr(value, "__setitem__")
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
