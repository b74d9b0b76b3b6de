"""The memory of cells: states of equal shape are side by side, so that a snapshot takes one copy per device.

Nothing here waits for a device: `sent` only starts the copy to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from torchhook.core.errors import TapError
from torchhook.core.transfer import sent_home
from torchhook.stats.stat import Stat

_BLOCK = 4 << 20  # bytes of a block, about
_MOST = 256  # states in a block, at most


class Block:
    """Room for the states of several cells: of one statistic, one shape, and one device."""

    def __init__(self, stat: Stat, empty: Tensor) -> None:
        self.stat = stat
        self.empty = empty
        self.room = max(1, min(_MOST, _BLOCK // max(1, empty.nbytes)))
        self.states = empty.new_empty(self.room, *empty.shape)  # only what is used costs time, and memory on the host
        self.used = 0
        self._is_new = True  # whether nothing was merged into the states since they were empty

    def take(self) -> int:
        """Reserve the next state, which is empty; returns its number."""
        self.states[self.used].copy_(self.empty)
        self.used += 1
        return self.used - 1

    def merge(self, states: Tensor, start: int = 0) -> None:
        """Merge other states into these, one by one, from the number `start` on. Only this may write to the block."""
        mine = self.states[start : start + len(states)]
        mine.copy_(states if self._is_new else self.stat.merge(torch.stack([mine, states])))
        self._is_new = False

    def reset(self) -> None:
        """Make all states empty."""
        self.states[: self.used].copy_(self.empty)
        self._is_new = True


class Shelf:
    """Blocks of states. It grows as states are requested."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.device, torch.Size], list[Block]] = {}

    def place(self, stat: Stat, x: Tensor) -> tuple[Block, int]:
        """Reserve a state for values like `x`; returns its block, and its number in it."""
        with torch.inference_mode(False):  # else it could not be written to later
            empty = stat.empty(x)
            if empty.is_meta or type(empty) is not Tensor:  # as under FakeTensorMode
                raise TapError(f"a {type(empty).__name__} on the {empty.device} device has no values")
            blocks = self._blocks.setdefault((stat.key, empty.device, empty.shape), [])
            if not blocks or blocks[-1].used == blocks[-1].room:
                blocks.append(Block(stat, empty))
            return blocks[-1], blocks[-1].take()

    def __iter__(self) -> Iterator[Block]:
        for blocks in self._blocks.values():
            yield from blocks


def sent(blocks: Iterable[Block]) -> dict[Block, Callable[[], tuple[Tensor, ...]]]:
    """Send the current states to the host, in one copy per device; returns a reader for each block."""
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
    """A reader of the states of one block, which takes them apart once."""
    return cache(lambda: arrived()[start : start + shape.numel()].view(shape).unbind())
