"""A thread beside the training: it reads what was measured, judges it, and writes it to the logs."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.core.text import warn
from torchhook.rules.check import failed
from torchhook.training.judge import Judge
from torchhook.training.logs import Entry, Log

_WAITING = 64  # windows; a log that is slower than the training loses some
_PATIENCE = 60.0  # seconds, for logs to take what is left in the end


Arriving = Callable[[], Entry]
"""A measured step on its way from the device; to call it waits until it has arrived."""


class Worker:
    """Takes windows, and gives findings.

    Logs that have to be written to from the training's own thread are, when that calls `deliver`.
    """

    def __init__(self, judge: Judge, logs: Iterable[Log]) -> None:
        self.judge = judge
        self.logs = list(logs)
        self.lost = 0  # windows that found no room
        self.broken: list[Finding] = []  # what failed of our own
        self.findings: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        self._here: queue.SimpleQueue[tuple[Log, str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._windows: queue.Queue[tuple[Arriving | None, str]] = queue.Queue(_WAITING)  # the last: and how it ended
        self._process = os.getpid()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="torchhook", daemon=True)
        self._thread.start()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin the logs, in the training's own thread; what cannot be begun is done without."""
        for log in list(self.logs):
            self._guarded(log, "begin", (about,))

    def put(self, entry: Arriving) -> bool:
        """Give the thread a measured step, unless its queue is full. It never waits."""
        try:
            self._windows.put_nowait((entry, ""))
        except queue.Full:
            return False
        return True

    def deliver(self) -> None:
        """Write to the logs that want it in this thread."""
        while not self._here.empty():
            log, what, args = self._here.get()
            self._guarded(log, what, args)

    def finish(self, state: str, last: Arriving | None = None) -> Report:
        """Let the thread judge for the last time and end the logs, and wait for it; not in a forked process."""
        if os.getpid() != self._process or self._is_over:
            return self.report()
        if threading.current_thread() is self._thread:  # who had us was collected here: another has to wait for it
            threading.Thread(target=self.finish, args=(state, last)).start()
            return self.report()
        self._is_over = True
        if not self._has_ended(state, last):
            self.fail("writing", TimeoutError(f"it takes more than {_PATIENCE:.0f} seconds, and is left behind"))
        self.deliver()
        return self.report()

    def report(self) -> Report:
        """The report as it is now."""
        known = self.judge.report or Report()
        lost = (f"{self.lost} windows were left out: to read and write them took longer",) if self.lost else ()
        return replace(known, findings=(*known.findings, *self.broken), notes=(*known.notes, *lost))

    def fail(self, what: str, error: BaseException) -> None:
        """Something of our own has failed: it is told, and stops nothing, not even where warnings are errors."""
        reason = f"{type(error).__name__}: {error}"
        if len(self.broken) < 10:
            self.broken.append(failed(what, reason))
        with suppress(UserWarning):
            warn(f"{what} raised {reason:.300}")

    def _has_ended(self, state: str, last: Arriving | None) -> bool:
        """Tell the thread that it is over; whether it was ready in time."""
        until = time.monotonic() + _PATIENCE
        try:
            self._windows.put((last, state), timeout=_PATIENCE)
        except queue.Full:  # a window less is to be read, should it ever come back
            with suppress(queue.Empty):
                self._windows.get_nowait()
            self._windows.put_nowait((last, state))
        self._thread.join(max(0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        state = ""
        while not state:
            arriving, state = self._windows.get()
            if arriving is not None:
                self._read(arriving)
        self._judged(partial(self.judge.check, last=True))
        self._tell("end", self.report(), state)

    def _read(self, arriving: Arriving) -> None:
        try:
            entry = arriving()
        except Exception as error:  # a fault of ours must not end the thread
            self.fail("what was measured", error)
            return
        self._tell("write", entry)
        self._judged(partial(self.judge.add, entry))

    def _judged(self, judge: Callable[[], list[Finding] | None]) -> None:
        try:
            found = judge()
        except Exception as error:
            self.fail("a check", error)
            return
        if found is None:
            return
        for finding in found:
            self.findings.put(finding)
            self._tell("found", finding)
        windows = self.judge.history.windows
        self._tell("keep", self.report(), windows[-1].step if windows else 0)

    def _tell(self, what: str, *args: Any) -> None:
        for log in list(self.logs):
            if log.in_step:
                self._here.put((log, what, args))
            else:
                self._guarded(log, what, args)

    def _guarded(self, log: Log, what: str, args: tuple[Any, ...]) -> None:
        if log not in self.logs:
            return
        try:
            getattr(log, what)(*args)
        except (Exception, SystemExit) as error:
            self.logs.remove(log)
            self.fail(f"{type(log).__name__}, which is written to no more,", error)
