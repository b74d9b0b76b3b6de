"""Between the model and the disk: a thread that writes, and a line before it that holds a bounded number of bytes."""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from torchhook.activations.manifest import Manifest
from torchhook.activations.shard_writer import Amount, Harvested, ShardWriter
from torchhook.core.errors import BudgetError, HarvestError
from torchhook.core.text import in_units

Tell = Callable[[Amount], None]
"""Told of how much was written, of each batch."""


class Conveyor:
    """Writes batches in the order in which they are put, from a thread of its own.

    Whoever puts waits while more than `max_bytes` are on the way. An error of the thread is raised where the next batch
    is put, or at the end. If whoever puts fails, all that was put before is written and committed.
    """

    def __init__(self, out: Path, manifest: Manifest, max_bytes: int, commit_seconds: float, tell: Tell) -> None:
        self._out = out
        self._manifest = manifest
        self._max_bytes = max_bytes
        self._commit_seconds = commit_seconds
        self._tell = tell
        self._line: deque[Harvested | None] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._whole = True
        self._thread = threading.Thread(target=self._run, name="torchhook-harvest", daemon=True)

    def __enter__(self) -> Conveyor:
        self._thread.start()
        return self

    def put(self, harvested: Harvested) -> None:
        """Hand over a batch, and wait until there is room for it."""
        size = harvested.amount.nbytes
        require_budget(harvested, self._max_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self._has_room(size))
            self._raise()
            self._line.append(harvested)
            self._bytes += size
            self._changed.notify_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole = kind is None  # else the last shard goes on another time
        with self._changed:
            self._line.append(None)
            self._changed.notify_all()
        self._thread.join()
        if kind is None:
            self._raise()

    def _has_room(self, size: int) -> bool:
        """Whether a batch fits, and another one like it, which is made meanwhile."""
        return not self._bytes or self._bytes + 2 * size <= self._max_bytes

    def _raise(self) -> None:
        if isinstance(self._error, OSError) and self._error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HarvestError(
                f"the disk of {str(self._out)!r} is full; what was committed is safe: make room and call harvest again,"
                " which goes on from there"
            ) from self._error
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with (
                ThreadPoolExecutor(1, "torchhook-checksum") as checksums,
                ThreadPoolExecutor(1, "torchhook-ending") as endings,
            ):
                self._write(checksums, endings)
        except BaseException as error:  # to be raised where somebody hears it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write(self, checksums: ThreadPoolExecutor, endings: ThreadPoolExecutor) -> None:
        writer: ShardWriter | None = None
        ending: Future[None] | None = None
        committed = time.monotonic()
        try:
            while (harvested := self._next()) is not None:
                shard = harvested.number // self._manifest.batches_per_shard
                if writer is None or writer.shard != shard:
                    # one shard gets to the disk while the next one is written
                    ending, writer = _ended(ending, writer, endings), None
                    writer = ShardWriter(self._out, self._manifest, shard, checksums)
                    committed = time.monotonic()
                writer.add(harvested)
                self._release(harvested)
                if time.monotonic() - committed >= self._commit_seconds:
                    writer.commit()
                    committed = time.monotonic()
            if self._whole:
                ending, writer = _ended(ending, writer, endings), None
            elif writer is not None:
                writer.commit()
            if ending is not None:
                ending.result()
        finally:
            if writer is not None:
                writer.close()

    def _next(self) -> Harvested | None:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._line))
            return self._line.popleft()

    def _release(self, harvested: Harvested) -> None:
        """Give room to the next ones, and tell of what is written."""
        with self._changed:
            self._bytes -= harvested.amount.nbytes
            self._changed.notify_all()
        self._tell(harvested.amount)


def require_budget(harvested: Harvested, max_bytes: int) -> None:
    """Refuse a batch that is too large by itself."""
    if harvested.amount.nbytes > max_bytes:
        raise BudgetError(
            f"batch {harvested.number} has {in_units(harvested.amount.nbytes)} of rows, more than memory_mb allows"
            f" ({in_units(max_bytes)}); use smaller batches or a larger budget"
        )


def _ended(before: Future[None] | None, writer: ShardWriter | None, endings: ThreadPoolExecutor) -> Future[None] | None:
    """The last commit of a shard, on its way; the one before has come to its end."""
    if before is not None:
        before.result()
    return None if writer is None else endings.submit(_end, writer)


def _end(writer: ShardWriter) -> None:
    try:
        writer.commit(done=True)
    finally:
        writer.close()
