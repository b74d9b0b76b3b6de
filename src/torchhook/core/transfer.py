"""Moving what is recorded to another device or dtype without waiting for the device.

From an accelerator to the CPU a value travels on a stream of its own into pinned memory; an event
says when it has arrived, and only reading waits for that.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
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
        self.source = source  # must not change, nor its memory be used again, before the copy is done
        self.event = event

    def arrived(self) -> bool:
        """Whether it is there, without waiting."""
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
    """Brings copies to `device` and `dtype` (of floating-point tensors), where given."""

    def __init__(self, device: torch.device | None, dtype: torch.dtype | None) -> None:
        self.device = device
        self.dtype = dtype
        self.streams: dict[torch.device, Any] = {}
        self.travelling: deque[Pending] = deque()

    def __call__(self, value: Any) -> Any:
        """`value` where it is wanted, or a `Pending` that will be."""
        while self.travelling and self.travelling[0].arrived():
            self.travelling.popleft()
        source = self._accelerator(value)
        if source is None:
            return mapped(self._moved, value)
        return self._send(value, source)

    def _accelerator(self, value: Any) -> torch.device | None:
        """Where `value` must be fetched from asynchronously, if it must."""
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
    """`x` on its way to the host, where it can be read by calling what is returned: only that waits, and only once.

    `x` must not be written to any more.
    """
    if x.device.type != "cuda":
        here = x.cpu()
        return lambda: here
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    arrival = torch.cuda.Event()
    arrival.record(torch.cuda.current_stream(x.device))
    return Arriving(pinned, arrival)


class Arriving:
    """What was sent to the host into pinned memory, which is given back when it is first read: it is scarce."""

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
    except (OSError, StopIteration):  # not Linux: half of what the machine has
        pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**20
        return pages * 4096 // 2
