"""The samples of a store: the id of each, in the order of the rows, and the way back from an id."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from torchhook.activations.mapped import Part
from torchhook.core.errors import HarvestError


class Samples:
    """The ids of all samples; read when they are first needed.

    >>> samples = Samples([])
    >>> len(samples), samples.ids
    (0, tensor([], dtype=torch.int64))
    """

    def __init__(self, parts: Sequence[Part]) -> None:
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
