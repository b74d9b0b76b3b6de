"""The rows of one site of a store, read on demand: by index, by sample, or in batches."""

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
from torchhook.core.renamed import renamed
from torchhook.core.text import in_units
from torchhook.stats.moments import Moments, Summary


class Column:
    """The rows of one site: one per sample, or one per token. Writing to a tensor read from it changes no file.

    See `torchhook.Activations` for an example.
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
        """Made by `Activations`: `kept` and the files have one entry per shard; `offsets` is empty unless ragged."""
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
        """The number of rows."""
        return self._starts[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows together."""
        return len(self), *self._features

    @property
    def nbytes(self) -> int:
        """The size of all rows on disk."""
        return sum(part.nbytes for part in self.parts)

    @property
    def files(self) -> list[RowFile]:
        """All files of this site."""
        return [*self.parts, *self._offsets]

    @property
    def shared_out(self) -> list[tuple[int, int]]:
        """How the rows of each shard belong to its samples; equal for ragged columns with the same tokens."""
        return [(part.rows, offsets.crc32) for part, offsets in zip(self.parts, self._offsets, strict=True)]

    @property
    def overflow(self) -> int:
        """How many finite values became infinite because they are too large for `dtype`."""
        return sum(kept.overflow for kept in self._kept)

    @cached_property
    def statistics(self) -> Summary:
        """Moments of the values as the model returned them, measured during the harvest; no rows are read."""
        states = [state for kept in self._kept if (state := kept.state()) is not None]
        total, moments = merged_moments(states), Moments()
        return moments.of(torch.empty(0)) if total is None else moments.compute(total)

    def __getitem__(self, rows: Any) -> Tensor:
        """One row for an int; several for a slice, integers or a mask.

        A slice within one shard is a view of the file, of which the system reads what is used.
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
        """The rows of the sample with this id, as rows × features even if there is only one."""
        place = self._samples.place(int(sample))
        if not self.ragged:
            return self._span(place, place + 1)
        start, stop = self._sample_starts[place : place + 2].tolist()
        return self._span(start, stop)

    def keys(self, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """The sample id of each row, and its position among the rows of that sample, from 0."""
        numbers = torch.atleast_1d(rows_of(rows, len(self), self.site))
        if not self.ragged:
            return self._samples.ids[numbers], torch.zeros_like(numbers)
        places = torch.bucketize(numbers, self._sample_starts[1:], right=True)
        return self._samples.ids[places], numbers - self._sample_starts[places]

    @renamed(memory_mb=("memory_bytes", lambda mib: round(mib * 2**20)))
    def batches(self, size: int, *, shuffle: bool = False, seed: int = 0, memory_bytes: int = 2**28) -> Batches[Tensor]:
        """All rows, `size` at a time (the last batch may be smaller), in order or shuffled by `seed`.

        Batches in order are views. To shuffle, blocks of neighbouring rows are read in random order into a buffer of
        `memory_bytes`, from which rows are drawn: each row once, and in any order if the buffer holds them all.
        """
        return Batches([self.parts], itemgetter(0), size, shuffle, seed, memory_bytes)

    def dataset(self) -> Dataset[Tensor]:
        """The rows as a map-style torch data set."""
        return RowDataset(self)

    def spread_over(self, other: Column) -> list[RepeatedRows]:
        """The rows of this column, one per sample, repeated for each row of the sample in the ragged column `other`."""
        triples = zip(self.parts, other._offsets, other.parts, strict=True)
        return [RepeatedRows(part, offsets, theirs.rows) for part, offsets, theirs in triples]

    def __repr__(self) -> str:
        shape, dtype = "×".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        return f"Column({self.site!r}, {shape} {dtype}, {in_units(self.nbytes)}{', ragged' if self.ragged else ''})"

    @cached_property
    def _sample_starts(self) -> Tensor:
        """Where in all rows each sample starts; the last number is where the last one ends. For ragged columns only."""
        triples = zip(self._offsets, self.parts, self._starts[:-1], strict=True)
        found = [sample_starts(offsets, part.rows)[:-1] + start for offsets, part, start in triples]
        return torch.cat([*found, torch.tensor([len(self)])])

    def _span(self, start: int, stop: int) -> Tensor:
        return spanned(self.parts, self._starts, start, stop) if start < stop else self._empty()

    def _empty(self) -> Tensor:
        return torch.empty(0, *self._features, dtype=self.dtype)


class RowDataset(Dataset[Tensor]):
    """The rows of a column for a `DataLoader`.

    `Column.batches` and `Activations.loader` are faster: they read blocks, this reads row by row.
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
    """The ids of all samples in the order of the rows, read when they are first needed.

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
        """All ids."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(part.mapped(0, part.rows) for part in self.parts)])

    def place(self, sample: int) -> int:
        """The position of the sample with this id."""
        ids, order = self._sorted
        place = int(torch.searchsorted(ids, sample))
        if place == len(ids) or int(ids[place]) != sample:
            raise HarvestError(f"no sample {sample} in this store; .samples has all ids")
        return int(order[place])

    @cached_property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        ids, order = self.ids.sort(stable=True)
        return ids, order


def row_of(number: int, count: int, site: str) -> int:
    """The number of a row from 0, also if `number` counts from the end of the `count` rows.

    >>> row_of(-1, 5, "fc")
    4
    """
    if not -count <= number < count:
        raise IndexError(f"{site!r} has no row {number}: it has {count} rows")
    return number % count


def rows_of(rows: Any, count: int, site: str) -> Tensor:
    """The numbers, from 0, of the rows that an index selects from the `count` rows of a site.

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
        raise TypeError(f"index only the rows of {site!r}, then the features: column[rows][:, features]")
    try:
        return torch.as_tensor(rows, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise _wrong(site, short(rows)) from error


def _wrong(site: str, given: str) -> TypeError:
    return TypeError(f"index the rows of {site!r} by an int, a slice, integers or a mask, not by {given}")


def is_number(rows: Any) -> bool:
    """Whether an index selects a single row.

    >>> is_number(3), is_number(torch.tensor(3)), is_number([3]), is_number(torch.tensor(0.5))
    (True, True, False, False)
    """
    if isinstance(rows, Tensor):
        return not rows.dim() and not rows.is_floating_point()
    return hasattr(rows, "__index__") and not getattr(rows, "ndim", 0)
