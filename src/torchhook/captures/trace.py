"""`trace`: what a model calls, in order, one line per call."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

from torch import nn

from torchhook.core.event import Event
from torchhook.core.lifetime import Attaching
from torchhook.core.renamed import renamed
from torchhook.core.selection import Query, Selector
from torchhook.core.session import Session
from torchhook.core.tabular import Tabular
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves

_MOST = 100_000  # calls that are kept


@renamed(quiet=("progress", lambda quiet: not quiet))
def trace(model: nn.Module, *queries: Query, file: TextIO | None = None, progress: bool = True) -> Trace:
    """Print a line for each call of the selected modules (no query: every leaf) inside the block.

    A line has the path, the class, the shapes of input and output, the dtype and the time on the host. It is
    printed to `file`, by default to stdout, or with ``progress=False`` not at all. ``.calls`` has the newest 100,000
    calls.

    >>> import torch
    >>> from torchhook import trace
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> with trace(model, progress=False) as calls:
    ...     _ = model(torch.ones(2, 4))
    >>> [(call.path, call.kind, call.input, call.output) for call in calls.calls]
    [('0', 'Linear', '2×4', '2×3'), ('1', 'ReLU', '2×3', '2×3')]
    """
    return Trace(model, queries, file, progress)


class TracedCall(NamedTuple):
    """One call of one module. The time is measured on the host: an accelerator may still be running."""

    path: str
    kind: str
    call: int
    input: str
    output: str
    dtype: str
    milliseconds: float


class Trace(Attaching, Tabular):
    """The calls of a model as they happen; see `torchhook.trace`."""

    def __init__(self, model: nn.Module, queries: tuple[Query, ...], file: TextIO | None, progress: bool) -> None:
        log = CallLog(file, progress)  # a separate object: if hooks held this one, it would stay alive
        where = Selector.union(queries)
        self.calls = log.calls
        self._session = Session(
            model,
            [Tap(where, log.begin, "input"), Tap(where, log.end)],
            on_silent=None if queries else "ignore",  # without queries, modules may well not run
        )

    def open(self) -> Trace:
        """Start tracing. (``with`` does this.)"""
        self._session.open()
        return self

    def close(self) -> None:
        """Remove the hooks; the calls stay. (The end of the ``with`` block does this.)"""
        self._session.close()

    def abandon(self) -> None:
        self._session.abandon()

    def _records(self) -> list[dict[str, Any]]:
        names = ("path", "module", *TracedCall._fields[2:])
        return [dict(zip(names, call, strict=True)) for call in self.calls]

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        header = ("site", "module", *TracedCall._fields[2:])
        return header, [[*call[:-1], f"{call.milliseconds:.3f}"] for call in self.calls]


class CallLog:
    """Matches the beginning and the end of each call, and prints it."""

    def __init__(self, file: TextIO | None, progress: bool) -> None:
        self.file = file
        self.progress = progress
        self.calls: list[TracedCall] = []
        self.pass_number = -1
        self.under_way: dict[tuple[str, int, int], tuple[str, float]] = {}

    def begin(self, event: Event) -> None:
        """A call begins."""
        if event.pass_number != self.pass_number:  # calls of an earlier pass that raised never end
            self.pass_number = event.pass_number
            self.under_way.clear()
        self.under_way[event.path, event.pass_number, event.call] = shape_of(event.live), time.perf_counter()

    def end(self, event: Event) -> None:
        """A call returned."""
        elapsed = time.perf_counter()
        shape, began = self.under_way.pop((event.path, event.pass_number, event.call))
        dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for _, tensor in leaves(event.live))
        call = TracedCall(
            path=event.path,
            kind=type(event.module).__name__,
            call=event.call,
            input=shape,
            output=shape_of(event.live),
            dtype="/".join(dtypes),
            milliseconds=(elapsed - began) * 1e3,
        )
        self.calls.append(call)
        del self.calls[:-_MOST]
        if self.progress:
            print(_line(call), file=self.file or sys.stdout)


def _line(call: TracedCall) -> str:
    again = f" (call {call.call})" if call.call else ""
    what = f"{call.path}{again}: {call.kind}"
    return f"{what:<36} {call.input} → {call.output}  {call.dtype}  {call.milliseconds:.3f} ms"
