"""Values as they flow between modules: tensors inside tuples, lists, dicts and dataclasses.

`leaves` finds the tensors with their addresses, `mapped` replaces them and keeps the type of every container
(namedtuples, ``ModelOutput``, ``PackedSequence``, …). Objects of any other kind are opaque and stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchhook.core.torch_internals import sparse_indices, sparse_values

Address = tuple[Any, ...]
"""The keys that lead to a leaf: ``()`` for a bare tensor, ``(1, "h")`` for ``value[1]["h"]``."""


class Arguments(NamedTuple):
    """The arguments of a module's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(x: Any) -> Arguments:
        """The arguments that an input `x` stands for: a tuple of positional ones, a dict of keywords, or a single one.

        >>> Arguments.of({"x": 1})
        Arguments(args=(), kwargs={'x': 1})
        """
        if isinstance(x, tuple) and not isinstance(x, PackedSequence):
            return Arguments(x, {})
        return Arguments((), dict(x)) if isinstance(x, Mapping) else Arguments((x,), {})

    def unwrapped(self) -> Any:
        """The only positional argument, or the tuple of them, or, if there are none, the keywords."""
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
    for key, item in items_of(value):
        for address, leaf in leaves(item, kind):
            yield (key, *address), leaf


def mapped(
    change: Callable[[Any], Any], value: Any, kind: type = Tensor, *, faithful: bool = False, others: bool = True
) -> Any:
    """`value` with every leaf of type `kind` replaced by ``change(leaf)``; containers keep their types.

    `value` itself is never written to. A mapping of a class that cannot be copied safely becomes a dict, or, if the
    result must be `faithful`, stays as it is. Without `others`, all other objects in the containers become None.

    >>> import torch
    >>> mapped(lambda t: t.shape, [torch.ones(2), "text"])
    [torch.Size([2]), 'text']
    """
    if isinstance(value, kind):
        return change(value)
    if not (items := list(items_of(value))):
        return value if others or isinstance(value, (tuple, list, Mapping)) else None
    changed = [(key, mapped(change, item, kind, faithful=faithful, others=others)) for key, item in items]
    if isinstance(value, (tuple, list)):
        return _sequence_like(value, [item for _, item in changed])
    if isinstance(value, Mapping):
        known = isinstance(value, (dict, UserDict))
        return _mapping_like(value, dict(changed)) if known else value if faithful else dict(changed)
    twin = copy.copy(value)  # a dataclass, perhaps a frozen one
    for key, item in changed:
        object.__setattr__(twin, key, item)
    return twin


def replaced(value: Any, leaf_by_number: dict[int, Tensor]) -> Any:
    """`value` with some of its tensors replaced, numbered in the order of `leaves`, for the model to continue with."""
    numbers = count()

    def change(tensor: Tensor) -> Tensor:
        return leaf_by_number.get(next(numbers), tensor)

    return mapped(change, value, faithful=True)


def taken(value: Any, address: Address) -> Any:
    """The item at `address` in `value`; LookupError if there is none.

    >>> taken({"a": (1, 2)}, ("a", 1))
    2
    """
    for key in address:
        value = value[key] if isinstance(value, (Mapping, tuple, list)) else _attribute(value, key)
    return value


def put(value: Any, address: Address, item: Any) -> Any:
    """`value` with `item` at `address`: containers are rebuilt in their own types, never written to.

    >>> put((1, [2, 3]), (1, 0), "two")
    (1, ['two', 3])
    """
    if not address:
        return item
    key, *rest = address
    item = put(taken(value, (key,)), tuple(rest), item)
    if isinstance(value, (tuple, list)):
        items = [*value[:key], item, *value[key + 1 :]]
        if type(value) in (tuple, list, Arguments):  # spelled out, so that a compiler can follow
            return Arguments(*items) if type(value) is Arguments else type(value)(items)
        return _sequence_like(value, items)
    if isinstance(value, Mapping):
        return {**value, key: item} if type(value) is dict else _mapping_like(value, {key: item})
    if torch.compiler.is_dynamo_compiling():  # dynamo does not follow copies
        return type(value)(**dict(items_of(value)) | {key: item})
    twin = copy.copy(value)
    object.__setattr__(twin, key, item)
    return twin


def nbytes(value: Any) -> int:
    """The size of the tensors in `value`, in bytes."""
    return sum(_bytes_of(tensor) for _, tensor in leaves(value))


def _bytes_of(tensor: Tensor) -> int:
    try:
        return tensor.nbytes
    except RuntimeError:  # sparse: the sum of its parts
        return sparse_indices(tensor).nbytes + sparse_values(tensor).nbytes if tensor.is_sparse else 0


def items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and items of a container: a mapping, tuple, list or dataclass. Any other value has none.

    >>> list(items_of(("a", "b")))
    [(0, 'a'), (1, 'b')]
    """
    if value is None:
        return ()
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return ()


def _attribute(value: Any, name: Any) -> Any:
    if not (dataclasses.is_dataclass(value) and isinstance(name, str) and hasattr(value, name)):
        raise LookupError(name)
    return getattr(value, name)


def _sequence_like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, list):
        same = copy.copy(value)
        same[:] = items
        return same
    try:
        twin = tuple.__new__(type(value), items)  # its own constructor may take other arguments
    except TypeError:  # torch.return_types
        return type(value)(items)
    if hasattr(value, "__dict__"):
        twin.__dict__.update(value.__dict__)
    return twin


def _mapping_like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(value) is dict:
        return items
    twin: Any = copy.copy(value)
    for key, item in items.items():
        twin[key] = item
    own = getattr(twin, "__dict__", {})
    own.update({key: items[key] for key in own if key in items})  # items that are also attributes
    return twin
