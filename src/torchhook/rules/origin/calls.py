"""One call of a module: its arguments, the settings it ran under, and whether its output is finite.

Checking a tensor does not wait for the device: its minimum and maximum reveal NaN and Inf, and stay on the device as
its `marks` until `read` fetches those of many tensors at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.shards import local
from torchhook.core.torch_internals import BATCH_AND_INSTANCE_NORMS, norms_of_each, own_buffers, sparse_values
from torchhook.core.trees import Address, Arguments, leaves

NAN, UP, DOWN = 1, 2, 4
"""What a tensor may hold: NaN, +Inf, -Inf."""

BAD = NAN | UP
"""What a mask never contains: a mask is made of -Inf."""


def marks(value: Any) -> list[Tensor]:
    """The minimum and maximum of every tensor in `value`, on its device."""
    return [mark for _, tensor in leaves(value) for mark in _marks(tensor)]


def read(marked: list[Tensor]) -> list[int]:
    """Which nonfinite values the marks show, as bits; this waits for the device.

    >>> read(marks(torch.tensor([-torch.inf, 1.0])))
    [4, 0]
    """
    groups: dict[Any, list[int]] = {}
    for number, mark in enumerate(marked):
        groups.setdefault((mark.device, mark.dtype), []).append(number)
    bits = [0] * len(marked)
    for numbers in groups.values():
        values = torch.stack([marked[number] for number in numbers]).tolist()
        for number, value in zip(numbers, values, strict=True):
            bits[number] = bits_of(value)
    return bits


def are_finite(tensors: list[Tensor]) -> bool:
    """Whether the tensors hold neither NaN nor Inf; this waits for the device.

    >>> are_finite([torch.ones(2), torch.tensor([1.0, torch.nan])])
    False
    """
    groups: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        if (numbers := _numbers(tensor)) is not None:
            groups.setdefault((numbers.device, numbers.dtype), []).append(numbers)
    largest = [torch.stack(norms_of_each(group, torch.inf)).tolist() for group in groups.values()]
    return all(math.isfinite(value) for values in largest for value in values)


def bits_of(*values: float) -> int:
    """Which nonfinite values there are among these numbers.

    >>> in_words(bits_of(1.0, math.nan, -math.inf))
    'NaN and -Inf'
    """
    return merged(
        NAN if value != value else UP if value == math.inf else DOWN * (value == -math.inf) for value in values
    )


def bits_in(value: Any) -> int:
    """Which nonfinite values there are in the tensors of `value`.

    >>> in_words(bits_in({"x": torch.tensor([1.0, torch.inf]), "n": torch.tensor(3)}))
    'Inf'
    """
    return merged(read(marks(value)))


def merged(bits: Iterable[int]) -> int:
    """The union of the bits."""
    return reduce(or_, bits, 0)


def in_words(bits: int) -> str:
    """The names of the bits."""
    return " and ".join(word for bit, word in ((NAN, "NaN"), (UP, "Inf"), (DOWN, "-Inf")) if bits & bit)


class Setting(NamedTuple):
    """What a forward depends on besides its module and its arguments."""

    grad: bool
    inference: bool
    autocast: dict[str, tuple[bool, torch.dtype]]  # by type of device
    seeds: dict[str, Tensor]  # the states of the random number generators, by device

    @staticmethod
    def now(sources: Mapping[str, torch.Generator]) -> Setting:
        """The current setting, with the states of these generators."""
        kinds = {device.partition(":")[0] for device in sources}
        return Setting(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds},
            {device: generator.get_state() for device, generator in sources.items()},
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this setting inside the block."""
        devices = [device for device in self.seeds if device != "cpu"]
        with ExitStack() as stack:
            kind = devices[0].partition(":")[0] if devices else "cuda"
            stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
            torch.set_rng_state(self.seeds["cpu"])
            for device in devices:
                torch.get_device_module(device).set_rng_state(self.seeds[device], device)
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            stack.enter_context(torch.inference_mode(self.inference))
            if not self.inference:
                stack.enter_context(torch.set_grad_enabled(self.grad))
            yield


@dataclass(eq=False)
class Call:
    """One call of one module; `arguments` and `buffers` are as they were when the call began, copied on write."""

    path: str
    number: int
    pass_number: int
    module: nn.Module
    parent: Call | None
    setting: Setting
    begun: int
    arguments: Arguments
    wanted: list[bool]  # which tensors of the arguments required a gradient
    buffers: dict[str, Tensor]
    compiled: bool
    ended: int = 0
    marks: list[Tensor] = field(default_factory=list)
    bits: int = 0  # the nonfinite values in the output, once the marks have been read
    grads: dict[Address, Tensor] = field(default_factory=dict)  # of the output

    @property
    def place(self) -> tuple[str, int, int]:
        """Its path, call number and pass number, which identify it."""
        return self.path, self.number, self.pass_number

    @property
    def ancestors(self) -> Iterator[Call]:
        """The calls that it is part of, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent

    @cached_property
    def input_bits(self) -> int:
        """The nonfinite values in the arguments."""
        return bits_in(self.arguments)


def used_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a forward of `module` may read. A norm in train mode only writes its running statistics."""
    if isinstance(module, BATCH_AND_INSTANCE_NORMS) and module.training:
        return {}
    return {name: buffer for name, buffer in own_buffers(module).items() if buffer is not None}


def buffers_before(call: Call, calls: list[Call]) -> dict[str, Tensor]:
    """The buffers of the called module and its submodules as they were when `call`, one of `calls`, began."""
    names = {id(part): f"{name}." if name else "" for name, part in call.module.named_modules()}
    found = dict(call.module.named_buffers())
    for other in sorted(calls, key=lambda other: -other.begun):  # the first call of each submodule has the last word
        if (other is call or call in other.ancestors) and id(other.module) in names:
            found |= {names[id(other.module)] + name: buffer for name, buffer in other.buffers.items()}
    return found


def _marks(tensor: Tensor) -> tuple[Tensor, ...]:
    numbers = _numbers(tensor)
    return () if numbers is None else torch.aminmax(numbers)


def _numbers(tensor: Tensor) -> Tensor | None:
    """The floating-point values in `tensor`; None if it has none, or they cannot be read."""
    tensor = local(tensor.detach())
    try:
        if tensor.layout != torch.strided or tensor.is_nested:
            tensor = sparse_values(tensor) if tensor.is_sparse else tensor.values()
    except RuntimeError:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return None
    return tensor.float() if tensor.element_size() == 1 else tensor  # float8 cannot be compared


def generators(devices: Iterable[torch.device]) -> dict[str, torch.Generator]:
    """The random number generators of the CPU and of these devices, as far as torch exposes them."""
    found = {"cpu": torch.default_generator}
    for device in devices:
        known = getattr(getattr(torch, device.type, None), "default_generators", ())
        if device.index is not None and device.index < len(known):
            found[str(device)] = known[device.index]
    return found
