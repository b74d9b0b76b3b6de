"""What a harvest has written so far: samples, rows, bytes, rates and the time left, beside a progress bar."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from types import TracebackType

from torchhook.activations.shard_writer import Amount
from torchhook.core.progress import Tell, progress_bar
from torchhook.core.text import in_units


class Meter:
    """Shows how far a harvest has come, in a terminal only.

    >>> with Meter(100, quiet=True) as meter:
    ...     meter.add(Amount(samples=32, rows=32, nbytes=4096))
    """

    def __init__(self, total: int | None, quiet: bool) -> None:
        self._done = Amount()
        self._total = total
        self._file = None if quiet else sys.stderr
        self._start = time.monotonic()
        self._open = ExitStack()
        self._tell: Tell | None = None

    def __enter__(self) -> Meter:
        self._tell = self._open.enter_context(progress_bar("samples", self._file))
        return self

    def add(self, amount: Amount) -> None:
        """Count one more piece of work."""
        self._done = done = self._done.plus(amount)
        if self._tell is not None:
            seconds = max(time.monotonic() - self._start, 1e-9)
            size = f"{in_units(done.nbytes)}  {in_units(done.nbytes / seconds)}/s"
            self._tell(
                "samples", done.samples, self._total, f"{size}  {done.rows:,} rows  {done.rows / seconds:,.0f}/s"
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
