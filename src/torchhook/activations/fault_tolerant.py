"""Samples that cannot be read, or be put into a batch, without losing the others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torchhook.core.errors import HarvestError

_SKIP = "on_error='skip' leaves such samples out"
_ANCHORS = 4  # samples that others are compared with, to find out which of them is odd


class Sample(NamedTuple):
    """A sample as it was read, or the reason why there is none."""

    number: int
    value: Any
    reason: str | None = None


class Collated(NamedTuple):
    """Samples put together, and those that could not be."""

    batch: Any
    unread: dict[int, str]


class Tolerant:
    """A data set of which one sample may fail without the others.

    To its workers it looks like the data set itself: functions that prepare these read and write its attributes.
    """

    __slots__ = ("_dataset", "_skip")

    def __init__(self, dataset: Any, skip: bool) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_skip", skip)

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        if hasattr(self._dataset, "__getitems__"):
            with suppress(Exception):  # one by one, then, to see which it is
                values = self._dataset.__getitems__(indices)
                return [Sample(index, value) for index, value in zip(indices, values, strict=True)]
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> Sample:
        try:
            return Sample(index, self._dataset[index])
        except Exception as error:
            if not self._skip:
                raise HarvestError(f"sample {index} of data cannot be read: {told(error)}; {_SKIP}") from error
            return Sample(index, None, _reason(error))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[type[Tolerant], tuple[Any, bool]]:
        return Tolerant, (self._dataset, self._skip)


def collated(collate: Callable[[list[Any]], Any], skip: bool, samples: list[Sample]) -> Collated:
    """The samples that were read as a batch, without those that cannot be part of one."""
    unread = {sample.number: sample.reason for sample in samples if sample.reason is not None}
    good = [sample for sample in samples if sample.reason is None]
    try:
        return Collated(collate([sample.value for sample in good]) if good else None, unread)
    except HarvestError:
        raise
    except Exception as error:
        if not skip:
            which = f"{len(good)} samples of data, {good[0].number} to {good[-1].number}"
            raise HarvestError(f"{which}, are no batch: {told(error)}; {_SKIP}") from error
        return _collated_without(collate, good, unread)


def _collated_without(collate: Callable[[list[Any]], Any], samples: list[Sample], unread: dict[int, str]) -> Collated:
    """The samples without the odd ones among them; none, if there are more of these than of others."""
    for anchor in samples[:_ANCHORS]:
        reasons = {sample.number: _failing(collate, [anchor, sample]) for sample in samples}
        good = [sample for sample in samples if reasons[sample.number] is None]
        if 2 * len(good) >= len(samples) and _failing(collate, good) is None:
            odd = {number: reason for number, reason in reasons.items() if reason is not None}
            return Collated(collate([sample.value for sample in good]), unread | odd)
    reason = str(_failing(collate, samples))
    return Collated(None, unread | {sample.number: reason for sample in samples})


def _failing(collate: Callable[[list[Any]], Any], samples: list[Sample]) -> str | None:
    """Why samples are no batch, if they are none."""
    try:
        collate([sample.value for sample in samples])
        return None
    except Exception as error:
        return _reason(error)


def told(error: Exception) -> str:
    """What was raised, in words.

    >>> told(ValueError("too long"))
    'ValueError: too long'
    """
    return f"{type(error).__name__}: {error}"


def _reason(error: Exception) -> str:
    return told(error).splitlines()[0]
