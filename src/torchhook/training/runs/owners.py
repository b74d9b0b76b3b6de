"""Which process writes a run, and whether it is still running."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """What identifies this process on this machine: its id and, since ids are reused, when it started."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process is known to have ended. About one on another machine, nothing is known.

    >>> is_gone(this_process()), is_gone({**this_process(), "host": "elsewhere"})
    (False, False)
    >>> is_gone({**this_process(), "began": "earlier"})
    True
    """
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    return not is_running(pid) or (os.name == "posix" and owner.get("began") != _began(pid))


def is_running(pid: int) -> bool:
    """Whether a process on this machine may have this id.

    >>> is_running(os.getpid()), is_running(2**22 + 1)
    (True, False)
    """
    if os.name != "posix":  # elsewhere, signal 0 may end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it belongs to another user
        return True
    return True


def _began(pid: int) -> str | None:
    """When a running process started, in ticks since boot; None if it has ended, or there is no /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else fields[18]  # a zombie has ended
