"""How long the steps of a training take, on its device if that is a GPU; nothing waits for the device to know."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch import nn

_MOST = 1000  # steps that the device may be behind

Label = TypeVar("Label")


class Timeline:
    """Marks the ends of steps, and tells how long they took once that is known.

    >>> timeline = Timeline(nn.Linear(2, 2))
    >>> list(timeline.mark("first")), [label for label, seconds in timeline.mark("second")]
    ([], ['second'])
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameter = weakref.ref(next(model.parameters(), model))
        self._last: float | None = None
        self._events: deque[tuple[Any, Any]] = deque(maxlen=_MOST)

    def mark(self, label: Label) -> Iterator[tuple[Label, float]]:
        """A step ends, which is called `label`; yields the label and the seconds of steps that are known by now."""
        parameter = cast("Any", self._parameter())
        if not getattr(parameter, "is_cuda", False):
            now, before = time.perf_counter(), self._last
            self._last = now
            if before is not None:
                yield label, now - before
        elif not torch.cuda.is_current_stream_capturing():
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(parameter.device))
            self._events.append((label, event))
            yield from self._arrived()

    def _arrived(self) -> Iterator[tuple[Any, float]]:
        while len(self._events) > 1 and self._events[1][1].query():
            begin = self._events.popleft()[1]
            label, end = self._events[0]
            yield label, begin.elapsed_time(end) / 1e3
