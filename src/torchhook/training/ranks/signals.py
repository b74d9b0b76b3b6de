"""A rank that is told to end by SIGTERM, as torchrun does when another has died, still sends and writes what it has.

Python runs a handler only between two steps of its interpreter, and the training may be stuck in a call that waits for
the rank that died. So a thread waits for the signal, and ends the process itself if the training does not.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

_PATIENCE = 3.0  # seconds for the training to end by itself
TERMINATED = 128 + signal.SIGTERM
"""The exit code of a process that was told to end."""


class Terminated:
    """Calls `end` once this process is told to terminate, if nothing else handles that."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._is_over = threading.Event()
        self._before = -1
        self.was_told = False  # whether the process was told to end
        self._is_set = (
            threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        )
        if self._is_set:
            self._inside, self._outside = socket.socketpair()
            self._outside.setblocking(False)
            signal.signal(signal.SIGTERM, self._leave)
            self._before = signal.set_wakeup_fd(self._outside.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._wait, name="torchhook signals", daemon=True).start()

    def begin_to_end(self) -> None:
        """The training ends by itself: it is not disturbed any more."""
        self._is_over.set()

    def close(self) -> None:
        """Do what the process did before. Outside of the main thread, only the waiting ends."""
        if self._is_set and threading.current_thread() is threading.main_thread():
            self._is_set = False
            if signal.getsignal(signal.SIGTERM) == self._leave:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(self._before)
            self._outside.close()

    def _wait(self) -> None:
        while data := self._inside.recv(64):
            if signal.SIGTERM in data and not self._is_over.wait(_PATIENCE):
                self._end()
                sys.stderr.flush()
                os._exit(TERMINATED)
        self._inside.close()

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self.was_told = True
        if not self._is_over.is_set():
            raise SystemExit(TERMINATED)
