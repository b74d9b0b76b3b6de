"""How a script takes batches from its loaders: from the same iterator or a new one each time, and which batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from torchhook.core.torch_internals import LOADER_ITERATOR
from torchhook.core.trees import leaves
from torchhook.rules.loop import Feeding
from torchhook.training.launch.patches import Guard, replaced

_PRINTS = 64  # batches of a loader that are compared
_VALUES = 4096  # of a batch that are looked at

Print = tuple[Any, ...]


class Feeder:
    """A loader, as the script uses it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.iterators = self.taken = self.firsts = self.used_up = 0
        self.goes_on = False  # whether an iterator gave a second batch
        self.differs = False  # whether the first batches differ
        self.prints: list[Print] = []  # of the batches of the first iterator
        self.first: Print | None = None
        self.batches = _length(loader)
        self.workers = loader.num_workers if isinstance(loader.dataset, IterableDataset) else 0

    def gave(self, number: int, batch: Any) -> None:
        """An iterator gave its batch of this number, from 1."""
        self.taken += 1
        self.goes_on |= number > 1
        if number == 1 and not self.goes_on and self.firsts < _PRINTS:
            self.firsts += 1
            print_ = _print(batch)
            self.first = self.first or print_
            self.differs |= print_ is None or print_ != self.first
        if self.workers > 1 and self.iterators == 1 and len(self.prints) < _PRINTS:
            self.prints.append(_print(batch) or (self.taken,))

    def facts(self) -> Feeding:
        """What is known by now."""
        count = len(self.prints) // self.workers if self.workers > 1 else 0
        groups = [set(self.prints[n * self.workers : (n + 1) * self.workers]) for n in range(count)]
        varied = len(set(self.prints)) > 1
        return Feeding(
            batches=self.batches,
            iterators=self.iterators,
            taken=self.taken,
            firsts=0 if self.goes_on or self.differs else self.firsts,
            workers=self.workers,
            repeated=sum(len(group) == 1 for group in groups) if varied else 0,
            groups=count,
            used_up=self.used_up,
        )


class Feeders:
    """All loaders of the script; only what it takes with gradients enabled counts."""

    def __init__(self, drawn: Callable[[Feeder], None]) -> None:
        self._drawn = drawn  # is called with each loader that gives a batch, in the thread that takes it
        self._feeders: weakref.WeakKeyDictionary[DataLoader[Any], Feeder] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, Drawing] = weakref.WeakKeyDictionary()

    @contextmanager
    def seen(self, guard: Guard) -> Iterator[None]:
        """See what all loaders give, from now on."""
        begun, gave, ended = guard(self._begun), guard(self._gave), guard(self._ended)
        with ExitStack() as patches:
            patches.enter_context(replaced(DataLoader, "__iter__", _iterating(begun)))
            if LOADER_ITERATOR is not None:
                patches.enter_context(replaced(LOADER_ITERATOR, "__next__", _giving(gave, ended)))
            yield

    def _begun(self, loader: DataLoader[Any], iterator: Any) -> None:
        if torch.is_grad_enabled():
            feeder = self._feeders.get(loader)
            if feeder is None:
                feeder = self._feeders[loader] = Feeder(loader)
            feeder.iterators += 1
            self._iterators[iterator] = Drawing(feeder)

    def _gave(self, iterator: Any, batch: Any) -> None:
        drawing = self._iterators.get(iterator)
        if drawing is not None:
            drawing.given += 1
            drawing.feeder.gave(drawing.given, batch)
            self._drawn(drawing.feeder)

    def _ended(self, iterator: Any) -> None:
        drawing = self._iterators.get(iterator)
        if drawing is not None:
            drawing.feeder.used_up += drawing.has_ended
            drawing.has_ended = True


class Drawing:
    """One iterator of a loader."""

    def __init__(self, feeder: Feeder) -> None:
        self.feeder = feeder
        self.given = 0
        self.has_ended = False


def _iterating(begun: Callable[..., None]) -> Callable[[Any], Any]:
    def of(original: Any) -> Any:
        @wraps(original)
        def iterate(loader: Any) -> Any:
            iterator = original(loader)
            begun(loader, iterator)
            return iterator

        return iterate

    return of


def _giving(gave: Callable[..., None], ended: Callable[..., None]) -> Callable[[Any], Any]:
    def of(original: Any) -> Any:
        @wraps(original)
        def give(iterator: Any) -> Any:
            try:
                batch = original(iterator)
            except StopIteration:
                ended(iterator)
                raise
            gave(iterator, batch)
            return batch

        return give

    return of


def _length(loader: DataLoader[Any]) -> int:
    if isinstance(loader.dataset, IterableDataset):  # to ask for its length makes torch warn of another one
        return 0
    try:
        return len(loader)
    except Exception:  # of a sampler without a length
        return 0


def _print(batch: Any) -> Print | None:
    """A fingerprint of the first tensor of a batch; None if there is none on the CPU."""
    found = next((tensor for _, tensor in leaves(batch)), None)
    if found is None or not _is_readable(found):
        return None
    values = found.detach().reshape(-1)
    some = values[:: max(1, len(values) // _VALUES)].double()
    return (*found.shape, float(some.sum()), float(some @ torch.arange(1.0, len(some) + 1, dtype=some.dtype)))


def _is_readable(found: Tensor) -> bool:
    return found.device.type == "cpu" and found.layout is torch.strided and found.is_contiguous() and found.numel() > 0
