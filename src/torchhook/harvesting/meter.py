"""A line in the terminal with what a harvest has written so far: samples, bytes, their rate and the time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from torchhook.text import in_units

_EVERY = 0.2  # seconds


class Meter:
    """Shows how far a harvest is, in a terminal alone.

    >>> with Meter(100, quiet=True) as meter:
    ...     meter.add(32, 4096)
    >>> meter.samples
    32
    """

    def __init__(self, total: int | None, quiet: bool) -> None:
        self.samples = 0
        self.nbytes = 0
        self._total = total
        self._shows = not quiet and sys.stderr.isatty()
        self._start = self._shown = time.monotonic()

    def __enter__(self) -> Meter:
        return self

    def add(self, samples: int, nbytes: int) -> None:
        """More of both."""
        self.samples += samples
        self.nbytes += nbytes
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
        seconds = max(self._shown - self._start, 1e-9)
        parts = [f"{self.samples:,}" + (f"/{self._total:,}" if self._total else "") + " samples", in_units(self.nbytes)]
        parts += [f"{self.samples / seconds:,.0f}/s", f"{in_units(self.nbytes / seconds)}/s"]
        if self._total and self.samples:
            left = max(0, round(seconds / self.samples * (self._total - self.samples)))
            parts.append(f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left")
        print("\r" + "  ".join(parts) + "\x1b[K", end="", file=sys.stderr, flush=True)
