"""Running compiled code eagerly for a while, in any number of threads at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_lock = threading.Lock()
_inside = [0]  # how many blocks are open now
_stance = ExitStack()


@contextmanager
def eagerly() -> Iterator[None]:
    """Run what is compiled as if it were not, within the block.

    torch has one stance for all threads. If each block restored the one that it found, blocks that overlap would leave
    everything uncompiled for good. So the first to begin sets it, and the last to end restores it.
    """
    with _lock:
        if not _inside[0]:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _inside[0] += 1
    try:
        yield
    finally:
        with _lock:
            _inside[0] -= 1
            if not _inside[0]:
                _stance.close()
