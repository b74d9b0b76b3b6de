"""`overhead`: what hooks cost on a model, measured by running the same forward with and without them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook.captures.capture import capture
from torchhook.core.batch import inputs_of
from torchhook.core.model_state import state_kept
from torchhook.core.selection import Query, require_module
from torchhook.core.tabular import frame
from torchhook.core.tap import require_count


class Overhead(NamedTuple):
    """Milliseconds per forward without and with hooks, each the median of `runs`."""

    plain: float
    hooked: float
    runs: int

    @property
    def ratio(self) -> float:
        """How many times longer the hooked forward takes."""
        return self.hooked / self.plain

    def table(self, kind: str | None = None) -> Any:
        """One row: a DataFrame if pandas is installed, else a list of dicts; `kind` chooses, as elsewhere."""
        return frame([{**self._asdict(), "ratio": self.ratio}], kind)

    def __repr__(self) -> str:
        return f"plain {self.plain:.3f} ms, hooked {self.hooked:.3f} ms: {self.ratio:.2f}× (median of {self.runs})"


def overhead(model: nn.Module, x: Any, *queries: Query, runs: int = 30, **options: Any) -> Overhead:
    """What capturing costs on this model and input, compared with the plain forward.

    `x` is the input, a tuple of positional arguments or a dict of keyword arguments; `queries` and `options`
    are those of `capture`. The two forwards alternate, so that a change of the machine affects both. Buffers (a
    BatchNorm counts its batches) and random states are restored afterwards.

    >>> import torch
    >>> from torchhook import overhead
    >>> overhead(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.ones(2, 4), runs=3)  # doctest: +ELLIPSIS
    plain ... ms, hooked ... ms: ...× (median of 3)
    """
    require_module(model)
    require_count(runs, "runs")
    args, kwargs = inputs_of(x, model)
    options = {"on_silent": "ignore", **options}
    with state_kept(model):
        return _timed(lambda: model(*args, **kwargs), lambda: capture(model, *queries, **options), runs)


def _timed(forward: Callable[[], Any], hooked: Callable[[], AbstractContextManager[Any]], runs: int) -> Overhead:
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(2 * (runs + 1)):
        with_hooks = bool(number % 2)
        with hooked() if with_hooks else nullcontext():
            started = time.perf_counter()
            forward()
            _finish()
            times[with_hooks].append((time.perf_counter() - started) * 1e3)
    plain, with_ = (statistics.median(times[key][1:]) for key in (False, True))  # the first warms up
    return Overhead(plain, with_, runs)


def _finish() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
