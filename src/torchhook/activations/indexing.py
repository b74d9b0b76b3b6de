"""Which rows somebody means, and where they lie: what a tensor would understand in brackets, for rows in many files."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from reprlib import repr as short
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.activations.mapped import Part, Stretch

_THREADS = 8  # for a page that is not in memory each waits for the disk, which serves several at a time
_PIECE = 1 << 15  # values: for more, torch itself would begin threads, in each of ours
_SLOW = 1e-3  # seconds for a piece, of which copying takes a tenth
_PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Run(NamedTuple):
    """Consecutive rows of one part."""

    part: int
    start: int
    stop: int


class Pick(NamedTuple):
    """Rows of one part, and the memory for them."""

    part: Part
    rows: Tensor
    into: Tensor


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Where each part begins, and where the last one ends.

    >>> starts_of([3, 2])
    [0, 3, 5]
    """
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


def runs(starts: Sequence[int], start: int, stop: int) -> Iterator[Run]:
    """Where the rows from `start` to `stop` lie.

    >>> list(runs([0, 3, 5], 2, 5))
    [Run(part=0, start=2, stop=3), Run(part=1, start=0, stop=2)]
    """
    while start < stop:
        part = bisect_right(starts, start) - 1
        end = min(stop, starts[part + 1])
        yield Run(part, start - starts[part], end - starts[part])
        start = end


def row_of(number: int, count: int, site: str) -> int:
    """The number, from 0, of one of the `count` rows of a site, also if counted from the end.

    >>> row_of(-1, 5, "fc")
    4
    """
    if not -count <= number < count:
        raise IndexError(f"{site!r} has no row {number}: it has {count}")
    return number % count


def rows_of(rows: Any, count: int, site: str) -> Tensor:
    """The numbers, from 0, of those of the `count` rows of a site that are meant.

    >>> rows_of([-1, 0], 5, "fc"), rows_of(torch.tensor([True, False, True]), 3, "fc"), rows_of(slice(2), 5, "fc")
    (tensor([4, 0]), tensor([0, 2]), tensor([0, 1]))
    """
    if isinstance(rows, slice):
        meant = range(count)[rows]
        return torch.arange(meant.start, meant.stop, meant.step) if meant else torch.empty(0, dtype=torch.int64)
    found = _tensor_of(rows, site)
    if found.dtype == torch.bool:
        if tuple(found.shape) != (count,):
            raise IndexError(
                f"a mask must have one value for each of the {count} rows of {site!r}, not shape {tuple(found.shape)}"
            )
        return found.nonzero().flatten()
    if not found.numel():
        return found.long()
    if found.is_floating_point() or found.is_complex():
        raise _wrong(site, str(found.dtype))
    found = found.long()
    low, high = (int(edge) for edge in found.aminmax())
    row_of(low, count, site), row_of(high, count, site)
    return torch.where(found < 0, found + count, found)


def _tensor_of(rows: Any, site: str) -> Tensor:
    if isinstance(rows, tuple):
        raise TypeError(f"rows of {site!r} are indexed alone: write column[rows][:, features]")
    try:
        return torch.as_tensor(rows, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong(site, short(rows)) from error


def _wrong(site: str, given: str) -> TypeError:
    return TypeError(f"rows of {site!r} are named by an int, a slice, whole numbers or a mask, not by {given}")


def spanned(parts: Sequence[Stretch], starts: Sequence[int], start: int, stop: int) -> Tensor:
    """Consecutive rows, at least one: of one part as they lie there, of several together."""
    found = [parts[run.part].span(run.start, run.stop) for run in runs(starts, start, stop)]
    return found[0] if len(found) == 1 else torch.cat(found)


def gathered(parts: Sequence[Part], starts: Sequence[int], rows: Tensor, empty: Tensor) -> Tensor:
    """Rows from anywhere, by several threads: part after part, and then in the order that was asked for."""
    found = torch.empty(len(rows), *empty.shape[1:], dtype=empty.dtype)
    if not found.numel():
        return found
    part_of = torch.bucketize(rows, torch.tensor(starts[1:]), right=True)
    order = part_of.argsort(stable=True)
    inside = (rows - torch.tensor(starts)[part_of])[order]
    counts = torch.bincount(part_of, minlength=len(parts)).tolist()
    size = max(1, _PIECE * len(rows) // found.numel())
    picks = [
        Pick(part, some, into)
        for part, of_part, place in zip(parts, inside.split(counts), as_plain(found).split(counts), strict=True)
        for some, into in zip(of_part.split(size), place.split(size), strict=True)
        if len(some)
    ]
    _pick_all(picks)
    if max(counts) == len(rows):
        return found
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return as_plain(found).index_select(0, back).view(found.dtype)


def _pick_all(picks: Sequence[Pick]) -> None:
    """In this thread, which is the fastest, as long as rows are in memory; in several from the first that is not."""
    for number, pick in enumerate(picks, 1):
        began = perf_counter()
        _pick(pick)
        if perf_counter() - began > _SLOW:
            with ThreadPoolExecutor(_THREADS) as pool:  # one that stays would not outlive a fork
                list(pool.map(_pick, picks[number:]))
            return


def _pick(pick: Pick) -> None:
    torch.index_select(as_plain(pick.part.scattered), 0, pick.rows, out=pick.into)


def as_plain(x: Tensor) -> Tensor:
    """The same memory as whole numbers, which can be picked and put whatever the dtype is.

    >>> as_plain(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.int16
    """
    return x.view(_PLAIN[x.dtype.itemsize])


def is_number(rows: Any) -> bool:
    """Whether one row is meant.

    >>> is_number(3), is_number(torch.tensor(3)), is_number([3]), is_number(torch.tensor(0.5))
    (True, True, False, False)
    """
    if isinstance(rows, Tensor):
        return not rows.dim() and not rows.is_floating_point()
    return hasattr(rows, "__index__") and not getattr(rows, "ndim", 0)
