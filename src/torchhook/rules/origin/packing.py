"""Arguments taken apart for a file: tensors under names, all else as JSON; and put together again.

Nothing in a file is run or imported. A type is looked up among what is imported already, must be a tuple, list, mapping
or dataclass, and is filled without its ``__init__``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import UserDict
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, int, bool, type(None))


class Packing:
    """Takes values apart; `lost` names what cannot be."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.lost: list[str] = []

    def pack(self, value: Any, name: str) -> dict[str, Any]:
        """`value` as JSON; the tensors in it go to `tensors`.

        >>> packing = Packing()
        >>> packing.pack({"x": torch.ones(2), "n": 3}, "kwargs")["items"]
        [['x', {'tensor': 'kwargs.x', 'device': 'cpu'}], ['n', {'value': 3}]]
        """
        kind = type(value)
        if isinstance(value, Tensor):
            return self._tensor(value, name)
        if kind in _PLAIN:
            return {"value": value}
        if kind is float:
            return {"float": value.hex()}
        if isinstance(value, (torch.dtype, torch.device)):
            return {kind.__name__: str(value).removeprefix("torch.")}
        items = _items(value) if _found(_name(kind)) is kind else None
        if items is None or not all(type(key) in _PLAIN for key, _ in items):
            self.lost.append(f"{name} ({_name(kind)})")
            return {"lost": name}
        return {"type": _name(kind), "items": [[key, self.pack(item, f"{name}.{key}")] for key, item in items]}

    def _tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            self.lost.append(f"{name} (a {type(tensor).__name__} that is not plain)")
            return {"lost": name}
        while name in self.tensors:  # the keys 1 and "1" read the same
            name += "'"
        told: dict[str, Any] = {"tensor": name, "device": str(tensor.device)}
        if tensor.is_complex():
            tensor, told["complex"] = torch.view_as_real(tensor), True
        # A file knows neither shared memory nor strides.
        self.tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return told


def unpack(told: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """What `Packing.pack` took apart.

    >>> packing = Packing()
    >>> unpack(packing.pack((1.5, torch.float16, {"x": torch.ones(2)}), "args"), packing.tensors)
    (1.5, torch.float16, {'x': tensor([1., 1.])})
    """
    if "tensor" in told:
        tensor = tensors[told["tensor"]]
        tensor = torch.view_as_complex(tensor) if told.get("complex") else tensor
        return tensor.to(available(told["device"]))
    if "value" in told:
        return told["value"]
    if "float" in told:
        return float.fromhex(told["float"])
    if "dtype" in told:
        return dtype_of(told["dtype"])
    if "device" in told:
        return available(told["device"])
    kind = _found(told["type"])
    if kind is None:
        raise ValueError(f"it has a {told['type']}, which is no container that is imported here")
    return _filled(kind, [(key, unpack(item, tensors)) for key, item in told["items"]])


def dtype_of(name: str) -> torch.dtype:
    """The dtype called so."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def available(device: str) -> torch.device:
    """The device called so, or the CPU where there is none."""
    found = torch.device(device)
    return found if found.type == "cpu" or torch.get_device_module(found).is_available() else torch.device("cpu")


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """What is in a container, None if it is none."""
    if isinstance(value, (dict, UserDict)):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _found(name: str) -> type | None:
    """The container type called so, if it is imported. (``getattr`` could import more.)"""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    is_container = isinstance(found, type) and (
        issubclass(found, (tuple, list, dict, UserDict)) or dataclasses.is_dataclass(found)
    )
    return found if is_container else None


def _filled(kind: Any, items: list[tuple[Any, Any]]) -> Any:
    """A container of type `kind` with `items`, made without its own constructor."""
    values = [item for _, item in items]
    base = next(base for base in kind.__mro__ if base.__module__ in ("builtins", "collections"))
    if issubclass(kind, tuple):
        return kind(values) if kind.__module__ == "torch.return_types" else tuple.__new__(kind, values)
    made = base.__new__(kind)
    if issubclass(kind, list):
        base.extend(made, values)
    for key, item in items if issubclass(kind, dict) else ():
        base.__setitem__(made, key, item)
    if issubclass(kind, UserDict):
        made.__dict__["data"] = dict(items)
    for key, item in items if dataclasses.is_dataclass(kind) else ():
        object.__setattr__(made, key, item)
    return made
