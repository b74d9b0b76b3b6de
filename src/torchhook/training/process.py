"""Facts about this process for a log: the command, the versions, and which of several processes it is."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn


def rank() -> int:
    """The rank of this process among those that train together; 0 if it is alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """How many processes train together."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))


def described() -> dict[str, Any]:
    """Facts about this process, as JSON values."""
    return {
        "started": time.time(),
        "command": _typed(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "rank": rank(),
        "world_size": world_size(),
        "versions": {
            "torchhook": sys.modules["torchhook"].__version__,  # imported by now, since this is part of it
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }


def header(about: Mapping[str, Any], run: str | None = None) -> dict[str, Any]:
    """What the header of a report says, from the facts about a training or a process."""
    facts = {
        "run": run,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(about["started"])),
        "command": shlex.join(_command(about["command"])),
        "versions": about["versions"],
        "device": about.get("device"),
    }
    return {name: fact for name, fact in facts.items() if fact}


def _typed() -> list[str]:
    """The command of this process; `torchhook run` gives the script arguments of its own."""
    words = sys.orig_argv[: -len(sys.argv)]
    for at in range(len(words) - 1):
        if Path(words[at]).name == "torchhook" and words[at + 1] == "run":
            return ["torchhook", *sys.orig_argv[at + 1 :]]
    return sys.argv


def _command(arguments: Sequence[Any]) -> list[str]:
    """A command as it is typed: without the folder in which torchhook is installed."""
    first, *rest = map(str, arguments)
    own = Path(first)
    return ["torchhook" if own.name == "torchhook" or own.match("torchhook/__main__.py") else first, *rest]


def device_of(model: nn.Module) -> str | None:
    """The device of a model, with the name of a GPU; None if it has no parameters."""
    first = next(model.parameters(), None)
    if first is None:
        return None
    return f"{first.device} ({torch.cuda.get_device_name(first.device)})" if first.is_cuda else str(first.device)
