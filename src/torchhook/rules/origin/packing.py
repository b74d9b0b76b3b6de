"""The arguments of a call as tensors and JSON for a file, and back.

Nothing in a file is executed or imported. The type of a container must already be imported, must be a tuple, list, dict
or dataclass, and is filled without calling its ``__init__``.
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

from torchhook.core.trees import items_of

_PLAIN = (str, int, bool, type(None))


class Packing:
    """Converts values to JSON and tensors; `lost` names those that cannot be stored."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.lost: list[str] = []

    def pack(self, value: Any, name: str) -> dict[str, Any]:
        """`value` as JSON; its tensors go to `tensors`.

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
        items = list(items_of(value)) if _container_type(_name(kind)) is kind else None
        if items is None or not all(type(key) in _PLAIN for key, _ in items):
            self.lost.append(f"{name} ({_name(kind)})")
            return {"lost": name}
        return {"type": _name(kind), "items": [[key, self.pack(item, f"{name}.{key}")] for key, item in items]}

    def _tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
            self.lost.append(f"{name} (a {type(tensor).__name__} that is not a plain, dense tensor)")
            return {"lost": name}
        while name in self.tensors:  # the keys 1 and "1" read the same
            name += "'"
        packed: dict[str, Any] = {"tensor": name, "device": str(tensor.device)}
        if tensor.is_complex():
            tensor, packed["complex"] = torch.view_as_real(tensor), True
        # safetensors stores neither shared memory nor strides.
        self.tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return packed


def unpack(packed: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The value that `Packing.pack` converted.

    >>> packing = Packing()
    >>> unpack(packing.pack((1.5, torch.float16, {"x": torch.ones(2)}), "args"), packing.tensors)
    (1.5, torch.float16, {'x': tensor([1., 1.])})
    """
    if "tensor" in packed:
        tensor = tensors[packed["tensor"]]
        tensor = torch.view_as_complex(tensor) if packed.get("complex") else tensor
        return tensor.to(available(packed["device"]))
    if "value" in packed:
        return packed["value"]
    if "float" in packed:
        return float.fromhex(packed["float"])
    if "dtype" in packed:
        return dtype_of(packed["dtype"])
    if "device" in packed:
        return available(packed["device"])
    kind = _container_type(packed["type"])
    if kind is None:
        raise ValueError(f"it holds a {packed['type']}, which is not a container type imported here")
    return _filled(kind, [(key, unpack(item, tensors)) for key, item in packed["items"]])


def dtype_of(name: str) -> torch.dtype:
    """The dtype with this name."""
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found


def available(device: str) -> torch.device:
    """The device with this name, or the CPU if this machine does not have it."""
    found = torch.device(device)
    return found if found.type == "cpu" or torch.get_device_module(found).is_available() else torch.device("cpu")


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _container_type(name: str) -> type | None:
    """The container type with this name, if it is imported; looked up without ``getattr``, which could import more."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, (ModuleType, type)) else None
    if not isinstance(found, type):
        return None
    is_fillable = issubclass(found, (tuple, list, dict, UserDict))
    return found if is_fillable or (dataclasses.is_dataclass(found) and not issubclass(found, Mapping)) else None


def _filled(kind: Any, items: list[tuple[Any, Any]]) -> Any:
    """A container of type `kind` with `items`, made without calling its constructor.

    `core.trees` rebuilds containers by copying one that exists; a file has only the name of the type.
    """
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
