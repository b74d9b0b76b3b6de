"""One site of a store: a row a sample, or a row a token, in files, of which is read what is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchhook.errors import HarvestError
from torchhook.harvesting.batches import Batches
from torchhook.harvesting.indexing import gathered, is_number, row_of, rows_of, spanned, starts_of
from torchhook.harvesting.journal import Kept, merged
from torchhook.harvesting.manifest import Kind
from torchhook.harvesting.parts import Part
from torchhook.harvesting.samples import Samples
from torchhook.stats.moments import Moments, Summary
from torchhook.text import in_units


class Column:
    """The rows of one site; what it gives can be changed, and neither the files nor later readings are.

    See `torchhook.harvesting.activations.Activations` for an example.
    """

    def __init__(
        self,
        site: str,
        kind: Kind,
        samples: Samples,
        kept: Sequence[Kept],
        values: Sequence[Part],
        offsets: Sequence[Part],
    ) -> None:
        """Made by `Activations`: what was kept of each shard, and where; no `offsets` unless ragged."""
        self.site = site
        self.dtype = kind.torch_dtype
        self.ragged = kind.ragged
        self._features = kind.shape
        self._samples = samples
        self._kept = kept
        self._values = values
        self._offset_parts = offsets
        self._starts = starts_of([part.rows for part in values])

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
        return sum(part.nbytes for part in self._values)

    @property
    def parts(self) -> Sequence[Part]:
        """The files, in the order of the rows."""
        return self._values

    @property
    def shared_out(self) -> list[tuple[int, int]]:
        """How the rows of each shard belong to its samples; columns with the same have rows of the same things."""
        return [(kept.rows, kept.offsets_crc32 if self.ragged else 0) for kept in self._kept]

    @property
    def overflow(self) -> int:
        """How many finite values became infinite because `dtype` is too small for them."""
        return sum(kept.overflow for kept in self._kept)

    @cached_property
    def statistics(self) -> Summary:
        """Moments of the values as the model gave them, which were measured on the way; nothing is read for them."""
        states = [state for kept in self._kept if (state := kept.state()) is not None]
        total, moments = merged(states), Moments()
        return moments.of(torch.empty(0)) if total is None else moments.compute(total)

    def __getitem__(self, rows: Any) -> Tensor:
        """One row for a number; several for a slice, numbers or a mask.

        A slice inside one shard is a view of the file, and reads what is looked at.
        """
        if is_number(rows):
            row = row_of(int(rows), len(self))
            return self.span(row, row + 1)[0]
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step == 1:
                return self.span(start, max(start, stop))
            rows = torch.arange(start, stop, step) if (stop - start) * step > 0 else []
        numbers = rows_of(rows, len(self))
        found = gathered(self._values, self._starts, numbers.flatten(), self._empty())
        return found.view(*numbers.shape, *self._features)

    def span(self, start: int, stop: int) -> Tensor:
        """The rows from `start` to `stop`, which there are."""
        return spanned(self._values, self._starts, start, stop, self._empty())

    def of(self, sample: int) -> Tensor:
        """The rows of the sample with this id, also if it is one: rows × features."""
        place = self._samples.place(int(sample))
        if not self.ragged:
            return self.span(place, place + 1)
        start, stop = self.offsets[place : place + 2].tolist()
        return self.span(start, stop)

    def keys(self, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """Of each row the id of its sample, and which of that sample's rows it is, from 0."""
        if is_number(rows):
            rows = [int(rows)]
        elif isinstance(rows, slice):
            rows = torch.arange(len(self))[rows] if (rows.step or 1) > 0 else list(range(len(self))[rows])
        numbers = rows_of(rows, len(self))
        if not self.ragged:
            return self._samples.ids[numbers], torch.zeros_like(numbers)
        places = torch.bucketize(numbers, self.offsets[1:], right=True)
        return self._samples.ids[places], numbers - self.offsets[places]

    def batches(self, size: int, *, shuffle: bool = False, seed: int = 0, memory_mb: float = 256) -> Batches[Tensor]:
        """All rows, `size` at a time (the last may be fewer): in order, or mixed as `seed` says.

        In order they are views. Mixed they come from blocks of neighbours, read in random order into a buffer of
        `memory_mb` and drawn from there: each row once, and all in any order if the buffer holds them all.
        """
        return Batches([self], itemgetter(0), size, shuffle, seed, memory_mb)

    def dataset(self) -> Dataset[Tensor]:
        """The rows as a map-style data set of torch."""
        return Rows(self)

    def checksums(self) -> Iterator[tuple[Part, int]]:
        """Every file of this site, and its checksum by the journals."""
        for part, kept in zip(self._values, self._kept, strict=True):
            yield part, kept.crc32
        if self.ragged:
            for part, kept in zip(self._offset_parts, self._kept, strict=True):
                yield part, kept.offsets_crc32

    def __repr__(self) -> str:
        shape, dtype = "×".join(map(str, self.shape)), str(self.dtype).removeprefix("torch.")
        return f"Column({self.site!r}, {shape} {dtype}, {in_units(self.nbytes)}{', ragged' if self.ragged else ''})"

    @cached_property
    def offsets(self) -> Tensor:
        """Where among all rows those of each sample begin; the last number is where they end. Of ragged rows alone."""
        found = []
        for start, values, part in zip(self._starts, self._values, self._offset_parts, strict=False):
            offsets = part.mapped(0, part.rows)
            if int(offsets[0]) or int(offsets[-1]) != values.rows or bool((offsets.diff() < 0).any()):
                raise HarvestError(
                    f"{str(part.path)!r} is broken: it does not share out the {values.rows} rows of its shard"
                )
            found.append(offsets[:-1] + start)
        return torch.cat([*found, torch.tensor([len(self)])])

    def _empty(self) -> Tensor:
        return torch.empty(0, *self._features, dtype=self.dtype)


class Rows(Dataset[Tensor]):
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
