"""Who writes a run, and whether that process is still there."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def this_process() -> dict[str, Any]:
    """This process, to be known by others on this machine: numbers of processes are used again, so when it began."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}


def is_gone(owner: Mapping[str, Any]) -> bool:
    """Whether the process is known to have ended; of another machine's nothing is known.

    >>> is_gone(this_process()), is_gone({**this_process(), "host": "elsewhere"})
    (False, False)
    >>> is_gone({**this_process(), "began": "earlier"})
    True
    """
    pid = owner.get("pid")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    if os.name != "posix":  # elsewhere, to ask a process for a sign of life may end it
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # somebody else's
        return False
    return owner.get("began") != _began(pid)


def _began(pid: int) -> str | None:
    """When a process that runs began, in ticks since the machine did; None where there is no /proc."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else fields[18]  # it has ended, and nobody has asked how
