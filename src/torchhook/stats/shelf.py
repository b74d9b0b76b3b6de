"""Where the states of statistics lie: those of equal shape side by side, so that a window is one copy.

Nothing here waits for a device: what leaves for the host is on its way when `sent` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from torchhook.core.errors import TapError
from torchhook.core.transfer import sent_home
from torchhook.stats.stat import Stat

_BLOCK = 4 << 20  # bytes, about
_MOST = 256  # states in a block


class Block:
    """States of one statistic, of the same shape, on one device."""

    def __init__(self, stat: Stat, empty: Tensor) -> None:
        self.stat = stat
        self.empty = empty
        self.room = max(1, min(_MOST, _BLOCK // max(1, empty.nbytes)))
        self.states = empty.expand(self.room, *empty.shape).clone()
        self.used = 0

    def add(self, states: Tensor) -> None:
        """Merge others into these."""
        mine = self.states[: self.used]
        mine.copy_(self.stat.merge(torch.stack([mine, states[: self.used]])))

    def reset(self) -> None:
        """Forget what was seen."""
        self.states.copy_(self.empty)


class Shelf:
    """Blocks, which become more as states are asked for."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.device, torch.Size], list[Block]] = {}

    def place(self, stat: Stat, x: Tensor) -> tuple[Block, int]:
        """A state for values like `x`: its block, and its number there."""
        with torch.inference_mode(False):  # or it could not be written to later
            empty = stat.empty(x)
            if empty.is_meta or type(empty) is not Tensor:  # as under FakeTensorMode
                raise TapError(f"a {type(empty).__name__} on the {empty.device} device has no values")
            blocks = self._blocks.setdefault((stat.key, empty.device, empty.shape), [])
            if not blocks or blocks[-1].used == blocks[-1].room:
                blocks.append(Block(stat, empty))
        blocks[-1].used += 1
        return blocks[-1], blocks[-1].used - 1

    def __iter__(self) -> Iterator[Block]:
        for blocks in self._blocks.values():
            yield from blocks


def sent(blocks: Iterable[Block]) -> dict[Block, Callable[[], tuple[Tensor, ...]]]:
    """The states as they are now, one a site, on their way to the host in one copy a device; how to read those."""
    by_device: dict[torch.device, list[Block]] = {}
    for block in blocks:
        by_device.setdefault(block.states.device, []).append(block)
    readers: dict[Block, Callable[[], tuple[Tensor, ...]]] = {}
    for together in by_device.values():
        settled = [block.stat.settle(block.states[: block.used]) for block in together]
        arrived = sent_home(torch.cat([states.reshape(-1) for states in settled]))
        start = 0
        for block, states in zip(together, settled, strict=True):
            readers[block] = _reader(arrived, start, states.shape)
            start += states.numel()
    return readers


def _reader(arrived: Callable[[], Tensor], start: int, shape: torch.Size) -> Callable[[], tuple[Tensor, ...]]:
    """The states of one block, taken apart once for all who read them."""
    return cache(lambda: arrived()[start : start + shape.numel()].view(shape).unbind())
