"""A `Cell` adds up the values at one place of a model, call by call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from torchhook.core.text import warn
from torchhook.stats.reading import Row
from torchhook.stats.shelf import Block, Shelf
from torchhook.stats.stat import Stat, UnlikeError, counted

making = threading.RLock()  # cells and their states are created one at a time


class Cell:
    """The statistics of one tensor at one place, with one state per device that it was seen on.

    A statistic that raises is dropped there with a warning, because measuring must not stop a training. One that raises
    `UnlikeError` is dropped silently; reading it says why.
    """

    __slots__ = (
        "_device",
        "_lock",
        "_others",
        "_pairs",
        "_together",
        "failed",
        "label",
        "name",
        "note",
        "places",
        "seen",
        "shape",
        "shelf",
        "stats",
    )

    def __init__(self, shelf: Shelf, stats: Iterable[Stat], name: str, label: str = "", note: str = "") -> None:
        self.shelf = shelf
        self.stats = tuple(stats)
        self.name = name
        self.label = label  # the class of the module
        self.note = note  # what exactly is measured, in words
        self.seen = False
        self.shape: tuple[int, ...] | None = None  # of the latest value, unless it has none
        self.failed: dict[str, str] = {}  # why statistics were dropped, by name
        self.places: dict[torch.device, dict[str, tuple[Block, int]]] = {}  # where the states are, by key
        self._lock = threading.Lock()  # threads may share a session
        self._device: torch.device | None = None
        self._pairs: list[tuple[Stat, Tensor]] = []
        self._together: Callable[[Tensor], bool] | None = None  # updates two of the pairs at once
        self._others = self._pairs  # without these two

    def update(self, x: Tensor) -> None:
        """Add the values in `x`."""
        shape = None if x.is_nested else tuple(x.shape)
        if not _is_plain(x):
            x = counted(x)
        with self._lock:
            self.shape = shape
            if x.device != self._device:
                self.turn_to(x)
            self.seen = True
            done = self._together is not None and self._together(x)
            for stat, state in self._others if done else self._pairs:
                try:
                    if stat.update(state, x) is not None:  # a mistake in a Stat of the user
                        raise TypeError("update returned something; it has to write into the state instead")
                except Exception as error:  # noqa: PERF203 (each by itself)
                    self._give_up(stat, error)

    def turn_to(self, x: Tensor) -> None:
        """Use the states on the device of `x`, which are created now if there are none."""
        with making:
            places = self.places.setdefault(x.device, {})
            for stat in self.stats:
                if stat.key not in places:
                    try:
                        places[stat.key] = self.shelf.place(stat, x)
                    except Exception as error:
                        self._give_up(stat, error)
            by_key = {stat.key: stat for stat in self.stats}  # some share a state
            found = [(stat, *places[key]) for key, stat in by_key.items()]
            self._update_with([(stat, block.states[number]) for stat, block, number in found])
            self._device = x.device

    def row(self, readers: dict[Block, Callable[[], tuple[Tensor, ...]]]) -> Row:
        """The row of a snapshot that reads this cell."""
        states: dict[str, list[Callable[[], Tensor]]] = {stat.key: [] for stat in self.stats}
        for places in self.places.values():
            for key in states:
                block, number = places[key]
                states[key].append(partial(_nth, readers[block], number))
        return Row(self.stats, self.label, self.note, states, self.failed, self.shape)

    def _update_with(self, pairs: list[tuple[Stat, Tensor]]) -> None:
        """Update these states from now on: two of them together, if there is a way to do that."""
        self._pairs = self._others = pairs
        self._together = None
        for one, other in permutations(pairs, 2):
            self._together = one[0].together(one[1], *other)
            if self._together is not None:
                self._others = [pair for pair in pairs if pair is not one and pair is not other]
                break

    def _give_up(self, stat: Stat, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        given_up = [known.name for known in self.stats if known.key == stat.key]
        self.stats = tuple(known for known in self.stats if known.key != stat.key)
        self._update_with([pair for pair in self._pairs if pair[0].key != stat.key])
        self.failed = {**self.failed, **dict.fromkeys(given_up, reason)}
        if not isinstance(error, UnlikeError):
            warn(f"could not collect {stat.name!r} for {self.name}: {reason:.300}")


def _is_plain(x: Tensor) -> bool:
    """Whether `counted` would return `x` as it is."""
    is_dense = x.layout is torch.strided and not x.is_nested and not x.is_neg()
    return type(x) is Tensor and not x.requires_grad and x.is_floating_point() and is_dense


def _nth(read: Callable[[], tuple[Tensor, ...]], number: int) -> Tensor:
    return read()[number]
