"""A thread beside the training that reads what was measured, writes it to the logs, and checks the rules."""

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
from torchhook.core.text import message_of, warn
from torchhook.render.to_json import json as to_json
from torchhook.rules.check import failed
from torchhook.training.judge import Judge
from torchhook.training.logs import Entry, Log
from torchhook.training.price import Price
from torchhook.training.ranks.gather import Gather

_WAITING = 64  # entries; more are dropped, if the logs are slower than the training
_AHEAD = 3  # measured steps until all ranks act on a finding
_PATIENCE = 60.0  # seconds for the logs to finish at the end


Arriving = Callable[[], "Entry | None"]
"""Reads a measured step that is on its way from the device; calling it waits for it. None is no step."""


class Worker:
    """Takes entries, writes them to the logs, and puts what the judge finds into `findings`.

    Logs with `in_step` set are written to by the training's own thread, when it calls `deliver`.
    """

    def __init__(self, judge: Judge, logs: Iterable[Log], price: Price | None = None) -> None:
        self.judge = judge
        self.price = price  # what it costs is booked there
        self.logs = list(logs)
        self.about: dict[str, Any] = {}  # the header of the report
        self.lost = 0  # measured steps that were dropped
        self.broken: list[Finding] = []  # faults of torchhook itself
        self.findings: queue.SimpleQueue[Finding] = queue.SimpleQueue()
        self.gather: Gather | None = None  # where all ranks come together, if there are several
        self.writes = True  # whether this rank, if there are several, writes the run
        self.steps = 0  # of the training, when it is over
        self.may_end_apart = False  # whether other ranks may have more steps on purpose
        self.act_at = 0  # the step from which on to act on findings, so that all ranks do so together
        self.apart = 1  # steps between two that are measured
        self._gathered = 0.0  # seconds of the thread that gathers
        self._here: queue.SimpleQueue[tuple[Log, str, tuple[Any, ...]]] = queue.SimpleQueue()
        self.has_work_here = any(log.in_step for log in self.logs)  # now and then: most logs need no `deliver`
        self._windows: queue.Queue[tuple[Arriving | None, str]] = queue.Queue(_WAITING)  # the last has a state
        self._process = os.getpid()
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="torchhook", daemon=True)
        self._thread.start()

    def begin(self, about: Mapping[str, Any]) -> None:
        """Begin the logs, in the training's own thread. A log that fails to begin is dropped."""
        for log in list(self.logs):
            self._guarded(log, "begin", (about,))

    def put(self, entry: Arriving) -> bool:
        """Queue an entry, without waiting; False if the queue is full."""
        try:
            self._windows.put_nowait((entry, ""))
        except queue.Full:
            return False
        return True

    def deliver(self) -> None:
        """Write to the logs that must be called from this thread."""
        while not self._here.empty():
            log, what, args = self._here.get()
            self._guarded(log, what, args)

    @property
    def is_current_thread(self) -> bool:
        """Whether this is called in the worker's own thread."""
        return threading.current_thread() is self._thread

    def finish(self, state: str, last: Arriving | None = None) -> Report:
        """Check for the last time, end the logs, and wait for that. A forked process does not."""
        if os.getpid() != self._process or self._is_over:
            return self.report()
        self._is_over = True
        if not self._has_ended(state, last):
            self.fail("writing", TimeoutError(f"it took longer than {_PATIENCE:.0f} seconds; the rest is lost"))
        self.deliver()
        return self.report()

    def report(self) -> Report:
        """The report as it is now."""
        known = self.judge.report or Report()
        if not self.writes:
            known = replace(known, notes=(*known.notes, "the rank that writes the run has the report of all ranks"))
        lost = (f"{self.lost} windows were dropped: logging could not keep up",) if self.lost else ()
        findings, notes = (*known.findings, *self.broken), (*known.notes, *lost)
        watching = {} if self.price is None else {"watching": self.price.did["said"]}
        return replace(known, findings=findings, notes=notes, about={**self.about, **watching})

    def fail(self, what: str, error: BaseException) -> None:
        """Report a fault of torchhook itself. It stops nothing, not even where warnings are errors."""
        reason = f"{type(error).__name__}: {message_of(error)}"
        if len(self.broken) < 10:
            self.broken.append(failed(what, reason))
        with suppress(UserWarning):
            warn(f"{what} raised {reason:.300}")

    def _has_ended(self, state: str, last: Arriving | None) -> bool:
        """Tell the thread to finish; whether it did so in time."""
        until = time.monotonic() + _PATIENCE
        try:
            self._windows.put((last, state), timeout=_PATIENCE)
        except queue.Full:  # drop one entry, in case the thread ever wakes up
            with suppress(queue.Empty):
                self._windows.get_nowait()
            self._windows.put_nowait((last, state))
        self._thread.join(max(0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        state = ""
        while not state:
            arriving, state = self._windows.get()
            begun = time.thread_time()
            if arriving is not None:
                self._read(arriving)
            if self.price is not None:
                self.price.book_beside(time.thread_time() - begun + self._of_gathering())
            self._windows.task_done()
        self.about = {**self.about, "state": state}
        if self.gather is not None:
            error = self.about.get("error", {})
            said = ": ".join(filter(None, (error.get("type"), error.get("message"))))
            self.gather.close(self.steps, state, said, self.may_end_apart)
            while not self._windows.empty():  # what the other ranks have sent until then
                self._read(self._windows.get()[0])
            if not self.writes:
                return
        self._judged(partial(self.judge.check, last=True))
        self._call_logs("end", self.report(), state)

    def _read(self, arriving: Arriving | None) -> None:
        try:
            entry = None if arriving is None else arriving()
        except Exception as error:  # a fault of ours must not end the thread
            self.fail("reading a measured step", error)
            return
        if entry is None:
            return
        if self.gather is not None and entry.ranks is None:  # it comes back with those of the other ranks
            self.gather.put(entry)
            return
        self._call_logs("write", entry)
        self._judged(partial(self.judge.add, entry))

    def _of_gathering(self) -> float:
        """The seconds that the thread which gathers has worked since the last time."""
        if self.gather is None:
            return 0.0
        before, self._gathered = self._gathered, self.gather.worked
        return self._gathered - before

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
            self._call_logs("found", finding)
        if found and self.gather is not None:
            windows = self.judge.history.windows
            self.act_at = (windows[-1].step if windows else 0) + _AHEAD * self.apart
            self.gather.say({"findings": to_json(Report(tuple(found))), "from": self.act_at})
        windows = self.judge.history.windows
        self._call_logs("keep", self.report(), windows[-1].step if windows else 0)

    def _call_logs(self, what: str, *args: Any) -> None:
        """Call a method of all logs, now or when the training calls `deliver`."""
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
            self.fail(f"the log {type(log).__name__} (which is no longer used)", error)
