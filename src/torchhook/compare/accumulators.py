"""What is kept of the features of two models while a data set goes by: never more, however long it is.

Of narrow layers, the moments of every pair: exact, whatever the batches are. Of wide ones, for which these would be too
large, the unbiased estimate from groups of samples, summed over the groups: it needs the products of samples alone.
Moments are made in float64 of features about the mean of the first samples, so that neither large means nor a few large
samples cost precision. Products of samples are made as precisely as the features are given, of each group about its own
mean, and summed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchhook.compare.features import Place
from torchhook.compare.measures import u_centred, widened

GROUP_LEAST, GROUP_MOST = 32, 256  # samples whose products are taken together
LEAST = 4  # samples that an unbiased estimate needs
_ROWS = 256  # samples that wait for one another: to add to large moments costs as much for one as for all


class Layer:
    """One layer as it is executed, with the origin of its features, and those that are waiting for more."""

    def __init__(self, place: Place, rows: Tensor) -> None:
        self.place = place
        self.width = rows.shape[1]
        self.device = rows.device
        self.precision = torch.finfo(rows.dtype).eps  # of the features
        self.eps = torch.finfo(_computed(rows.dtype)).eps  # of what is computed of them
        self._origin: Tensor | None = None
        self._rest: Tensor | None = None

    @property
    def origin(self) -> Tensor:
        """About what the features are taken; known once there were enough of them."""
        assert self._origin is not None
        return self._origin.double()

    @cached_property
    def noise(self) -> float:
        """How far the features of a sample may be from those of another for no other reason than rounding."""
        return 2 * self.eps * float(self.origin.norm())

    def require_width(self, rows: Tensor) -> None:
        """Raise unless there are as many features as there were."""
        if rows.shape[1] != self.width:
            raise ValueError(
                f"{self.place} gave {self.width} features a sample in the first batch, and now {rows.shape[1]};"
                " pool='mean' makes them as many as there are channels"
            )

    def moved(self, x: Tensor) -> Tensor:
        """Features in float64 about the origin, which is the mean of the first that come: let them be many."""
        x = x.double()
        if self._origin is None:
            self._origin = x.mean(0)
        return x - self._origin

    def grams(self, x: Tensor, last: bool = False) -> list[Tensor]:
        """The products of samples, by groups; what is too few for one waits for the next batch."""
        if self._rest is not None:
            x = torch.cat([self._rest, x])
        self._rest = None
        if len(x) < GROUP_LEAST and not last:
            self._rest = x.clone()
            return []
        groups = x.tensor_split(-(-len(x) // GROUP_MOST)) if len(x) >= LEAST else ()
        return [self._gram(group.to(_computed(x.dtype))) for group in groups]

    def _gram(self, group: Tensor) -> Tensor:
        mean = group.mean(0)
        if self._origin is None:
            self._origin = mean
        group = group - mean
        with in_full(group.device):
            return group @ group.T

    def last_grams(self) -> list[Tensor]:
        """The same of those that still wait when there are no more batches; fewer than four are not enough."""
        return [] if self._rest is None else self.grams(self._rest[:0], last=True)


class Moments:
    """The moments of every pair of layers of two models, or of one and itself; exact."""

    def __init__(self, left: Sequence[Layer], right: Sequence[Layer], device: torch.device) -> None:
        self._layers = left, right
        widths = [[layer.width for layer in layers] for layers in self._layers]
        self.left, self.right = (_slices(side) for side in widths)
        self._cross = torch.zeros(*(_size(side) for side in widths), dtype=torch.float64, device=device)
        self._own = [[self._cross.new_zeros(width + 2, width + 2) for width in side] for side in widths]
        self._waiting: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []

    def add(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Add the features of a batch, a tensor a layer; both are the same list for a model and itself."""
        self._waiting.append((left, right))
        if sum(len(x) for (x, *_), _ in self._waiting) >= _ROWS:
            self.settle()

    def settle(self) -> None:
        """Add what still waits."""
        if not self._waiting:
            return
        left, right = zip(*self._waiting, strict=True)
        self._waiting = []
        same = left[0] is right[0]
        x = self._widened(left, 0)
        y = x if same else self._widened(right, 1)
        if same:
            self._own[1] = self._own[0]
        self._cross += x.T @ y

    def pair(self, row: int, column: int) -> Tensor:
        """The moments of two layers."""
        return self._cross[self.left[row], self.right[column]]

    def own(self, side: int, layer: int) -> Tensor:
        """Those of a layer of the left (0) or right (1) model with itself."""
        return self._own[side][layer]

    def _widened(self, batches: Sequence[Sequence[Tensor]], side: int) -> Tensor:
        """Everything about the samples of some batches in a row each; adds each layer to its own moments."""
        features = zip(self._layers[side], zip(*batches, strict=True), strict=True)
        found = [widened(layer.moved(torch.cat(parts)).to(self._cross.device)) for layer, parts in features]
        for moments, z in zip(self._own[side], found, strict=True):
            moments += z.T @ z
        return torch.cat(found, 1)


class Alignments:
    """How the products of samples agree between every pair of layers: an unbiased estimate from each group, summed."""

    def __init__(self, left: int, right: int, device: torch.device) -> None:
        self.cross = torch.zeros(left, right, dtype=torch.float64, device=device)
        self.own = [self.cross.new_zeros(left), self.cross.new_zeros(right)]
        self.raw = [self.cross.new_zeros(left), self.cross.new_zeros(right)]  # before centring
        self.samples = 0

    def add(self, left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> None:
        """Add the groups of a batch, of each layer."""
        for grams in zip(self._stacked(left), self._stacked(right), strict=True):
            x, y = (u_centred(gram).flatten(1) for gram in grams)
            self.cross += x @ y.T
            for side, (centred, gram) in enumerate(zip((x, y), grams, strict=True)):
                self.own[side] += centred.square().sum(1)
                self.raw[side] += gram.square().sum((1, 2))
            self.samples += grams[0].shape[-1]

    def _stacked(self, layers: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
        """Group by group, those of all layers."""
        for groups in zip(*layers, strict=True):
            yield torch.stack([group.to(self.cross.device) for group in groups])


def exact_width(left: Sequence[int], right: Sequence[int], max_bytes: int) -> int:
    """Up to which width layers have their moments kept, so that all of them fit into `max_bytes`; 0 if none do.

    >>> exact_width([8, 8, 1000], [8], 10_000)
    8
    """
    for most in sorted({*left, *right}, reverse=True):
        x, y = ([width for width in widths if width <= most] for widths in (left, right))
        own = sum((width + 2) ** 2 for width in (*x, *y))
        if 8 * (_size(x) * _size(y) + own) <= max_bytes:
            return most
    return 0


@contextmanager
def in_full(device: torch.device) -> Iterator[None]:
    """Multiply as precisely as the type can: neither autocast nor a setting for speed has a say."""
    backends: Any = torch.backends
    backend = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        backend.fp32_precision = before


def _computed(dtype: torch.dtype) -> torch.dtype:
    """In which type features are multiplied that are given in another."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _slices(widths: Sequence[int]) -> list[slice]:
    """Where the moments of each layer begin and end."""
    ends = list(accumulate((width + 2 for width in widths), initial=0))
    return [slice(*ends[number : number + 2]) for number in range(len(widths))]


def _size(widths: Sequence[int]) -> int:
    return sum(width + 2 for width in widths)
