"""One site of a store: a row a sample, or a row a token, in files, of which is read what is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchhook.activations.batches import Batches
from torchhook.activations.mapped import RepeatedRows, RowFile, gathered, sample_starts, spanned, starts_of
from torchhook.activations.store_files import RowFormat, SiteCommit, merged_moments
from torchhook.core.errors import HarvestError
from torchhook.core.text import in_units
from torchhook.stats.moments import Moments, Summary


class Column:
    """The rows of one site; what it gives can be changed, and neither the files nor later readings are.

    See `torchhook.activations.store.Activations` for an example.
    """

    def __init__(
        self,
        site: str,
        kind: RowFormat,
        samples: SampleIds,
        kept: Sequence[SiteCommit],
        parts: Sequence[RowFile],
        offsets: Sequence[RowFile],
    ) -> None:
        """Made by `Activations`: what was kept of each shard, and the files; no `offsets` unless ragged."""
        self.site = site
        self.dtype = kind.torch_dtype
        self.ragged = kind.ragged
        self.parts = parts
        self._features = kind.shape
        self._samples = samples
        self._kept = kept
        self._offsets = offsets
        self._starts = starts_of([part.rows for part in parts])

    def __len__(self) -> int:
        """How many rows there are."""
        return self._starts[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all rows together."""
        return len(self), *self._features

    @property
    def nbytes(self) -> int:
        """What all rows take on the disk."""
        return sum(part.nbytes for part in self.parts)

    @property
    def files(self) -> list[RowFile]:
        """All files of this site."""
        return [*self.parts, *self._offsets]

    @property
    def shared_out(self) -> list[tuple[int, int]]:
        """How the rows of each shard belong to its samples; ragged columns with the same have rows of the same."""
        return [(part.rows, offsets.crc32) for part, offsets in zip(self.parts, self._offsets, strict=True)]

    @property
    def overflow(self) -> int:
        """How many finite values became infinite because `dtype` is too small for them."""
        return sum(kept.overflow for kept in self._kept)

    @cached_property
    def statistics(self) -> Summary:
        """Moments of the values as the model gave them, which were measured on the way; nothing is read for them."""
        states = [state for kept in self._kept if (state := kept.state()) is not None]
        total, moments = merged_moments(states), Moments()
        return moments.of(torch.empty(0)) if total is None else moments.compute(total)

    def __getitem__(self, rows: Any) -> Tensor:
        """One row for an int; several for a slice, whole numbers or a mask.

        A slice inside one shard is a view of the file, and reads what is looked at.
        """
        if is_number(rows):
            row = row_of(int(rows), len(self), self.site)
            return self._span(row, row + 1)[0]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self._span(start, stop)
        numbers = rows_of(rows, len(self), self.site)
        found = gathered(self.parts, self._starts, numbers.flatten(), self._empty())
        return found.view(*numbers.shape, *self._features)

    def of(self, sample: int) -> Tensor:
        """The rows of the sample with this id, also if it is one: rows × features."""
        place = self._samples.place(int(sample))
        if not self.ragged:
            return self._span(place, place + 1)
        start, stop = self._begins[place : place + 2].tolist()
        return self._span(start, stop)

    def keys(self, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """Of each row the id of its sample, and which of that sample's rows it is, from 0."""
        numbers = torch.atleast_1d(rows_of(rows, len(self), self.site))
        if not self.ragged:
            return self._samples.ids[numbers], torch.zeros_like(numbers)
        places = torch.bucketize(numbers, self._begins[1:], right=True)
        return self._samples.ids[places], numbers - self._begins[places]

    def batches(self, size: int, *, shuffle: bool = False, seed: int = 0, memory_mb: float = 256) -> Batches[Tensor]:
        """All rows, `size` at a time (the last may be fewer): in order, or mixed as `seed` says.

        In order they are views. Mixed they come from blocks of neighbours, read in random order into a buffer of
        `memory_mb` and drawn from there: each row once, and all in any order if the buffer holds them all.
        """
        return Batches([self.parts], itemgetter(0), size, shuffle, seed, memory_mb)

    def dataset(self) -> Dataset[Tensor]:
        """The rows as a map-style data set of torch."""
        return RowDataset(self)

    def spread_over(self, other: Column) -> list[RepeatedRows]:
        """The rows, one a sample, each for every row that its sample has in `other`, which is ragged."""
        triples = zip(self.parts, other._offsets, other.parts, strict=True)
        return [RepeatedRows(part, offsets, theirs.rows) for part, offsets, theirs in triples]

    def __repr__(self) -> str:
        shape, dtype = "×".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        return f"Column({self.site!r}, {shape} {dtype}, {in_units(self.nbytes)}{', ragged' if self.ragged else ''})"

    @cached_property
    def _begins(self) -> Tensor:
        """Where among all rows those of each sample begin; the last number is where they end. Of ragged rows alone."""
        triples = zip(self._offsets, self.parts, self._starts[:-1], strict=True)
        found = [sample_starts(offsets, part.rows)[:-1] + start for offsets, part, start in triples]
        return torch.cat([*found, torch.tensor([len(self)])])

    def _span(self, start: int, stop: int) -> Tensor:
        return spanned(self.parts, self._starts, start, stop) if start < stop else self._empty()

    def _empty(self) -> Tensor:
        return torch.empty(0, *self._features, dtype=self.dtype)


class RowDataset(Dataset[Tensor]):
    """The rows of a column for a `DataLoader`, which asks for a batch at a time.

    Prefer `Column.batches`, or `Activations.loader`: they read blocks, and this reads row by row.
    """

    def __init__(self, column: Column) -> None:
        self.column = column

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, row: int) -> Tensor:
        return self.column[row]

    def __getitems__(self, rows: list[int]) -> list[Tensor]:
        return list(self.column[rows].unbind())


class SampleIds:
    """The ids of all samples; read when they are first needed.

    >>> samples = SampleIds([])
    >>> len(samples), samples.ids
    (0, tensor([], dtype=torch.int64))
    """

    def __init__(self, parts: Sequence[RowFile]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(part.rows for part in self.parts)

    @cached_property
    def ids(self) -> Tensor:
        """The ids."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(part.mapped(0, part.rows) for part in self.parts)])

    def place(self, sample: int) -> int:
        """Which of all samples has this id."""
        ids, order = self._sorted
        place = int(torch.searchsorted(ids, sample))
        if place == len(ids) or int(ids[place]) != sample:
            raise HarvestError(f"there is no sample {sample} here; .samples has the ids of those that are")
        return int(order[place])

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        ids, order = self.ids.sort(stable=True)
        return ids, order


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


def is_number(rows: Any) -> bool:
    """Whether one row is meant.

    >>> is_number(3), is_number(torch.tensor(3)), is_number([3]), is_number(torch.tensor(0.5))
    (True, True, False, False)
    """
    if isinstance(rows, Tensor):
        return not rows.dim() and not rows.is_floating_point()
    return hasattr(rows, "__index__") and not getattr(rows, "ndim", 0)
