"""Where a rank finds the others: through the key-value store of the process group, without any collective call."""

from __future__ import annotations

import os
import socket
from itertools import count

from torch import distributed

from torchhook.core.text import warn
from torchhook.core.torch_internals import default_store
from torchhook.training.process import rank, world_size
from torchhook.training.ranks.tree import Tree

_numbers = count()  # of the monitors in this process; the same on all ranks


def connected() -> Tree | None:
    """This rank's place in the tree of all that train together; None if it is alone."""
    if not (distributed.is_available() and distributed.is_initialized()) or world_size() == 1:
        return None
    try:
        return Tree(rank(), default_store(), f"torchhook/{next(_numbers)}", _host())
    except Exception as error:  # nothing of this may stop a training
        warn(f"this rank is watched alone, for the others cannot be found: {type(error).__name__}: {error}")
        return None


def _host() -> str:
    """The address at which other ranks reach this one: that of the network on which the first rank is."""
    first = os.environ.get("MASTER_ADDR", "localhost")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((first, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
