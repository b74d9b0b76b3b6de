"""The structure of a container as text, which can be part of a compiled graph, unlike the container itself."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import Parameter


def tensors_in(value: Any, found: list[Tensor]) -> str:
    """The structure of `value` as text; its tensors are appended to `found`.

    >>> import torch
    >>> tensors_in((torch.ones(1), None), [])
    "('builtins:tuple', [(0, 0), (1, None)])"
    """
    if isinstance(value, Tensor):
        found.append(value)
        return str(len(found) - 1)
    if value is None:
        return "None"
    if isinstance(value, Mapping):
        items = [f"({key!r}, {tensors_in(item, found)})" for key, item in value.items()]
    elif isinstance(value, (tuple, list)):
        items = [f"({key}, {tensors_in(item, found)})" for key, item in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        items = [f"({name!r}, {tensors_in(getattr(value, name), found)})" for name in names]
    else:
        return "None"
    return f"('{type(value).__module__}:{type(value).__qualname__}', [{', '.join(items)}])"


def are_plain(tensors: Sequence[Tensor]) -> bool:
    """Whether there are any, and all are of torch's own class: here, since a graph checks where it finds a class."""
    return len(tensors) > 0 and all(type(tensor) in (Tensor, Parameter) for tensor in tensors)


def rebuilt(text: str, tensors: Sequence[Any]) -> Any:
    """The value whose structure is `text`, with `tensors` in it; everything else in it becomes None.

    >>> rebuilt("('builtins:dict', [('a', 0), ('b', None)])", ["tensor"])
    {'a': 'tensor', 'b': None}
    """
    return tensors[0] if text == "0" else _built(_parsed(text), tensors)


_parsed = cache(ast.literal_eval)  # bounded: there are as many texts as tapped values in graphs


def _built(shape: Any, tensors: Sequence[Any]) -> Any:
    if shape is None or isinstance(shape, int):
        return None if shape is None else tensors[shape]
    name, fields = shape
    items = {key: _built(item, tensors) for key, item in fields}
    kind = _class(name)
    if kind is None:
        return items
    in_sequence = issubclass(kind, (tuple, list))
    try:
        if in_sequence:
            return tuple.__new__(kind, items.values()) if issubclass(kind, tuple) else kind(items.values())
        with_fields = dataclasses.is_dataclass(kind)
        return kind(**items) if with_fields else kind(items)
    except TypeError:  # a class that cannot be built from its fields
        return _torch_tuple(kind, list(items.values())) if in_sequence else items


def _torch_tuple(kind: Any, items: list[Any]) -> Any:
    """One of torch's own tuples, such as the result of ``torch.max``, or a plain one."""
    return kind(items) if kind.__module__ == "torch.return_types" else tuple(items)


@cache
def _class(name: str) -> Any:
    """The class called `name`, or None if it was defined inside a function."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
