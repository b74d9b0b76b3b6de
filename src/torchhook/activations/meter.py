"""A line in the terminal with what a harvest has written so far: samples, rows, bytes, rates and the time left."""

from __future__ import annotations

import sys
import time
from shutil import get_terminal_size
from types import TracebackType

from torchhook.activations.shard_writer import Amount
from torchhook.core.progress import bar
from torchhook.core.text import in_units

_EVERY = 0.2  # seconds


class Meter:
    """Shows how far a harvest is, in a terminal alone.

    >>> with Meter(100, quiet=True) as meter:
    ...     meter.add(Amount(samples=32, rows=32, nbytes=4096))
    """

    def __init__(self, total: int | None, quiet: bool) -> None:
        self._done = Amount()
        self._total = total
        self._shows = not quiet and sys.stderr.isatty()
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Meter:
        return self

    def add(self, amount: Amount) -> None:
        """So much more."""
        self._done = self._done.plus(amount)
        if self._shows and time.monotonic() - self._shown >= _EVERY:
            self._show()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shows:
            self._show()
            print(file=sys.stderr)

    def _show(self) -> None:
        self._shown = time.monotonic()
        done, seconds = self._done, max(self._shown - self._start, 1e-9)
        parts = [f"{bar(done.samples, self._total)} samples"]
        if self._total and done.samples:
            left = max(0, round(seconds / done.samples * (self._total - done.samples)))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        parts += [in_units(done.nbytes), f"{in_units(done.nbytes / seconds)}/s"]
        parts += [f"{done.rows:,} rows", f"{done.rows / seconds:,.0f}/s"]
        line = "  ".join(parts)[: get_terminal_size().columns - 1]  # a longer one would leave the line before behind
        print(f"\r{line}\x1b[K", end="", file=sys.stderr, flush=True)
