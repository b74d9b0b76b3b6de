"""Moving recorded values to another device or dtype without waiting for the device.

From an accelerator to the CPU, values are copied into pinned memory on a separate stream. An event shows when a copy is
complete, and only reading the value waits for that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook.core.snapshot import Held
from torchhook.core.trees import leaves, mapped


class Pending(Held):
    """A value on its way to the CPU."""

    __slots__ = ("event", "source", "value")

    def __init__(self, value: Any, source: Any, event: Any) -> None:
        self.value = value
        self.source = source  # kept, so that its memory is not reused before the copy is done
        self.event = event

    def arrived(self) -> bool:
        """Whether the copy is done; does not wait."""
        if self.source is not None and self.event.query():
            self.source = None
        return self.source is None

    def peek(self) -> Any:
        return self.value

    def read(self) -> Any:
        if self.source is not None:
            self.event.synchronize()
            self.source = None
        return self.value


class Transfer:
    """Moves copies to `device`, and floating-point tensors to `dtype`, where given."""

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self.device = device
        self.dtype = dtype
        self.streams: dict[torch.device, Any] = {}
        self.travelling: deque[Pending] = deque()

    def __call__(self, value: Any) -> Any:
        """`value` on the device, or a `Pending` that will be there."""
        while self.travelling and self.travelling[0].arrived():
            self.travelling.popleft()
        source = self._accelerator(value)
        if source is None:
            return mapped(self._moved, value)
        return self._send(value, source)

    def _accelerator(self, value: Any) -> torch.device | None:
        """The device from which `value` must be fetched asynchronously, if it must."""
        if self.device is None or self.device.type != "cpu":
            return None
        return next((tensor.device for _, tensor in leaves(value) if tensor.is_cuda), None)

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device or tensor.device, self._dtype(tensor))

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype

    def _send(self, value: Any, source: torch.device) -> Pending:
        side = self.streams.get(source)
        if side is None:
            side = self.streams[source] = torch.cuda.Stream(source)
        side.wait_stream(torch.cuda.current_stream(source))
        with torch.cuda.stream(side):
            pending = Pending(mapped(self._fetched, value), value, torch.cuda.Event())
            pending.event.record(side)
        for _, tensor in leaves(value):
            if tensor.is_cuda:
                tensor.record_stream(side)
        self.travelling.append(pending)
        return pending

    def _fetched(self, tensor: Tensor) -> Tensor:
        if not tensor.is_cuda:
            return self._moved(tensor)
        tensor = tensor.to(dtype=self._dtype(tensor))
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)


def sent_home(x: Tensor) -> Callable[[], Tensor]:
    """Start copying `x` to the host; returns a function that waits for the copy, once, and returns it.

    `x` must not be overwritten any more.
    """
    if x.device.type != "cuda":
        here = x.cpu()
        return lambda: here
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(x.device))
    return Arriving(pinned, arrival)


def sent_together(tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
    """Start copying many small tensors of one device to the host, in one copy for each dtype.

    Returns a function that waits for them.
    """
    places: dict[torch.dtype, list[int]] = {}
    for number, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(number)
    groups = {
        dtype: sent_home(torch.cat([tensors[number].reshape(-1) for number in numbers]))
        for dtype, numbers in places.items()
    }
    shapes = [tensor.shape for tensor in tensors]

    def arrived() -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for dtype, numbers in places.items():
            parts = groups[dtype]().split([shapes[number].numel() for number in numbers])
            found.update({number: part.view(shapes[number]) for number, part in zip(numbers, parts, strict=True)})
        return [found[number] for number in range(len(shapes))]

    return arrived


class Arriving:
    """A tensor that was sent to the host in pinned memory, which is scarce and is freed on the first read."""

    def __init__(self, value: Tensor, arrival: Any) -> None:
        self.value = value
        self.arrival = arrival
        self.reading = threading.Lock()

    def __call__(self) -> Tensor:
        with self.reading:
            if self.arrival is not None:
                self.arrival.synchronize()
                self.value, self.arrival = self.value.clone(), None
        return self.value


def free_memory(device: torch.device) -> int:
    """The bytes that are free on `device` now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: half of the machine's memory
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return pages * 4096 // 2
