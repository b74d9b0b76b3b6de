"""What is asked of each rank itself: whether its inputs and parameters are those of others, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.selection import unwrapped
from torchhook.core.shards import local, shards_of_gathered
from torchhook.core.sink import Sink
from torchhook.core.tap import Tap
from torchhook.core.transfer import sent_home
from torchhook.core.trees import leaves
from torchhook.stats.clock import Clock
from torchhook.stats.optimizer.steps import unwrapped as torch_optimizer
from torchhook.training.ranks.seat import checksum

Sums = dict[tuple[str, str], int]
"""Checksums by port (``"param"``, ``"buffer"`` or ``"state"``, that of the optimizer) and path."""


class Probe(Sink):
    """Takes checksums of the inputs, and the time from the beginning of a measured step to the end of its forward."""

    lazy = True

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._inputs: list[Tensor] = []
        self._began: Any = None
        self._ended: Any = None
        self._over: tuple[list[Tensor], Any, Any] = [], None, None  # the same of the step before

    def taps(self) -> list[Tap]:
        """Taps at the model itself."""
        return [Tap("", self, "input"), Tap("", self, "output")]

    @property
    def keeper(self) -> Clock:
        """The clock says with every pass whether it is measured."""
        return self.clock

    def turn(self, model: nn.Module, is_measured: bool) -> None:
        """A step has ended, and another begins."""
        self._over = self._inputs, self._began, self._ended
        self._inputs, self._began, self._ended = [], _now(model) if is_measured else None, None

    def receive(self, event: Event) -> None:
        """The model is called, or returns."""
        if not event.page.measured():
            return
        if event.site.port == "input":
            self._inputs += [checksum(local(x), ordered=True) for _, x in leaves(event.live) if _is_plain(x)]
        elif self._ended is None:
            self._ended = _now(event.module)

    def taken(self) -> Callable[[], dict[str, Any]]:
        """A reader of what was seen in the step that has ended."""
        inputs, began, ended = self._over
        self._over = [], None, None
        sums = sent_home(torch.stack([x.to(inputs[0].device) for x in inputs])) if inputs else None

        def read() -> dict[str, Any]:
            found: dict[str, Any] = {}
            if sums is not None:
                found["inputs"] = sums().tolist()
            if began is not None and ended is not None:
                found["seconds"] = _between(began, ended)
            return found

        return read


def checksums(model: nn.Module, optimizer: Any = None) -> Callable[[], Sums]:
    """A reader of the checksums of all parameters, of buffers, and of the states of the optimizer.

    >>> sums = checksums(nn.Linear(2, 1))()
    >>> list(sums)
    [('param', 'weight'), ('param', 'bias')]
    """
    with torch.no_grad():
        found = {
            key: sum_ for key, tensors in _tensors(unwrapped(model), optimizer) if (sum_ := _sum(tensors)) is not None
        }
    alike: dict[torch.device, list[tuple[str, str]]] = {}
    for key, known in found.items():
        alike.setdefault(known.device, []).append(key)
    arriving = [(keys, sent_home(torch.stack([found[key] for key in keys]))) for keys in alike.values()]
    return lambda: {
        key: number for keys, arrived in arriving for key, number in zip(keys, arrived().tolist(), strict=True)
    }


def _tensors(model: nn.Module, optimizer: Any) -> Iterator[tuple[tuple[str, str], list[Tensor]]]:
    states = {} if optimizer is None else torch_optimizer(optimizer).state
    shards = shards_of_gathered(model)  # which are what is trained
    for path, gathered in model.named_parameters():
        parameter = shards.get(id(gathered), gathered)
        yield ("param", path), [parameter]
        state = states.get(parameter)
        if state:
            yield ("state", path), [value for value in state.values() if isinstance(value, Tensor)]
    for path, buffer in model.named_buffers():
        yield ("buffer", path), [buffer]


def _sum(tensors: list[Tensor]) -> Tensor | None:
    found = [checksum(here) for tensor in tensors if _is_plain(here := local(tensor)) and here.numel()]
    return torch.stack([one.to(found[0].device) for one in found]).sum() if found else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has values in memory that can be read as numbers."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not (tensor.is_quantized or tensor.is_nested)
        and tensor.element_size() in (1, 2, 4, 8, 16)
    )


def _now(module: nn.Module) -> Any:
    """The time, on the device if that is a GPU; nothing waits for it."""
    parameter = next(module.parameters(), None)
    if parameter is None or not parameter.is_cuda or torch.cuda.is_current_stream_capturing():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(parameter.device))
    return event


def _between(began: Any, ended: Any) -> float:
    if isinstance(began, float) or isinstance(ended, float):
        return ended - began if isinstance(began, float) and isinstance(ended, float) else float("nan")
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1e3
