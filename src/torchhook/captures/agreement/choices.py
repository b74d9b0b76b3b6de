"""Choices between close values, such as the experts of a token, that come out otherwise in two runs by rounding alone.

A choice shows in integers that a module returns, and in the rows that others are called with. Rounding changes few of
them: the larger the errors in what is chosen from, the more. How many it changes at most is told from those errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.captures.agreement.evidence import ComparedTensor
from torchhook.captures.agreement.recorded_run import Observation
from torchhook.captures.agreement.rounding import Absent, rms, shapes_of

_NEAR, _FAR = 8.0, 0.5  # times the error of what rows are made of, and at most: rows that are so close are the same
_ROWS = 2048  # of a table, at most
_MOST = 0.25  # of all choices: if more come out otherwise, it is no rounding
_EFFECT = 2.0  # times the root of their share: the error that they make, if each changes one row completely
_CLOSE = 128.0  # times the error of what is chosen from: about so many choices are as close


@dataclass
class _Choices:
    """What one module has chosen in both runs."""

    number: int = 0  # how many choices are known
    other: int = 0  # how many of them came out otherwise
    start: int | None = None  # how many tensors were compared before the first that differs by more than rounding
    error: float = 0.0  # of what was chosen from, then

    def begin(self, compared: int, error: float) -> None:
        """Here something differs by more than rounding, perhaps for the first time."""
        if self.start is None:
            self.start, self.error = compared, error


class Routed(NamedTuple):
    """A module in which some choices came out otherwise by rounding."""

    where: str
    start: int  # how many tensors were compared before the first that shows it
    error: float  # of the module's own output that this explains, relative to its size


class ChoicesOf:
    """The choices of all modules, by path."""

    def __init__(self) -> None:
        self._known: dict[str, _Choices] = {}
        self._chosen: list[Tensor] = []  # integers that a module returned, and that differ

    def see(self, where: str, mine: Observation, theirs: Observation, compared: int, error: float) -> None:
        """Values that flowed in the forward of a module; `error` is that of what they were computed from."""
        path, port = theirs.location.site
        if port == "input":
            self._add(where, _rows(mine, theirs), compared, error)
        for one, other in _integers(mine.tensors, theirs.tensors):
            count = int((one != other).sum())
            if port == "output" and count:
                self._chosen.append(other)
            if any(other.shape == chosen.shape and other.equal(chosen) for chosen in self._chosen):
                self._add(path, (one.numel(), count), compared, error)

    def _add(self, path: str, counts: tuple[int, int], compared: int, error: float) -> None:
        known = self._known.setdefault(path, _Choices())
        known.number, known.other = known.number + counts[0], known.other + counts[1]
        if counts[1]:
            known.begin(compared, error)

    def differs(self, one: ComparedTensor, given: Sequence[Tensor], compared: int, error: float) -> None:
        """What flowed in the forward of a module, which was called with `given`, differs by more than rounding."""
        known = self._known.setdefault(one.where, _Choices())
        known.begin(compared, error)
        if one.location.site.port == "input" and any(_are_rows(one.tensors[1], whole) for whole in given):
            known.other += _others(*one.tensors, min(_FAR, _NEAR * max(error, one.epsilon)))

    def by_rounding(self) -> Iterator[Routed]:
        """The modules in which rounding explains the choices that differ."""
        for where, known in self._known.items():
            share = known.other / max(known.number, 1)
            if known.start is not None and 0 < share <= min(_MOST, _CLOSE * known.error):
                yield Routed(where, known.start, _EFFECT * math.sqrt(share))


def _rows(mine: Observation, theirs: Observation) -> tuple[int, int]:
    """How many rows a module was called with, and how many more in one of the runs."""
    shapes = [shape for one in (mine, theirs) for shape in shapes_of(one.tensors)[:1] if shape]
    if len(shapes) < 2 or shapes[0][1:] != shapes[1][1:]:
        return 0, 0
    rows = [shape[0] for shape in shapes]
    return max(rows), max(rows) - min(rows)


def _are_rows(tensor: Tensor, whole: Tensor) -> bool:
    """Whether a table consists of rows of another tensor, such as the tokens that an expert gets."""
    if isinstance(tensor, Absent) or isinstance(whole, Absent) or tensor.dim() != 2 or not whole.dim():
        return False
    return tensor.shape[-1:] == whole.shape[-1:] and not bool(_distances(tensor, whole).any())


def _others(mine: Tensor, theirs: Tensor, near: float) -> int:
    """How many rows of a table are in no place of another one, up to an error relative to its size."""
    if isinstance(mine, Absent):
        return 0
    return int((_distances(theirs, mine) > near * rms(mine.double()) * math.sqrt(mine.shape[-1])).sum())


def _distances(tensor: Tensor, whole: Tensor) -> Tensor:
    """How far each row of a table is from the nearest row of another tensor."""
    rows, others = (one.reshape(-1, one.shape[-1])[:_ROWS].double().nan_to_num() for one in (tensor, whole))
    apart: Tensor = torch.cdist(rows, others.to(rows.device), compute_mode="donot_use_mm_for_euclid_dist").amin(1)
    return apart


def _integers(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of tensors of integers."""
    for one, other in zip(mine, theirs, strict=False):
        here = not (isinstance(one, Absent) or isinstance(other, Absent))
        if here and not (one.is_floating_point() or one.is_complex()) and one.shape == other.shape:
            yield one, other
