"""Running sums over the features of two models, whose size does not depend on the number of samples.

Narrow layers keep the moments of every pair, which are exact for any batch sizes. For wide layers those would be too
large, so they sum an unbiased estimate over groups of samples, which only needs the inner products of samples. Moments
are computed in float64, relative to the mean of the first samples, so that neither large means nor a few large samples
cost precision. Inner products are computed in the precision of the features, relative to the mean of their group, and
summed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from torchhook.compare.features import LayerCall
from torchhook.compare.measures import u_centred, widened

GROUP_LEAST, GROUP_MOST = 32, 256  # samples in a group
LEAST = 4  # samples that an unbiased estimate needs at least
_HELD = 2**26  # bytes of features that wait to be multiplied together
_STRIP = 32  # rows of inner products that a CPU computes together; with fewer, its products are slower
_ROWS = 256  # samples to collect first: adding to large moments costs as much for one as for many


class LayerFeatures:
    """One call of a layer: the origin of its features, and samples that wait until a group is complete."""

    def __init__(self, layer_call: LayerCall, rows: Tensor) -> None:
        self.layer_call = layer_call
        self.width = rows.shape[1]
        self.device = rows.device
        self.precision = torch.finfo(rows.dtype).eps  # of the features
        self.eps = torch.finfo(_computed(rows.dtype)).eps  # of what is computed from them
        self._origin: Tensor | None = None
        self._rest: Tensor | None = None

    @property
    def origin(self) -> Tensor:
        """What is subtracted from the features; known once the first group or batch has been added."""
        assert self._origin is not None
        return self._origin.double()

    @cached_property
    def noise(self) -> float:
        """How far rounding alone may move the features of two samples apart."""
        return 2 * self.eps * float(self.origin.norm())

    def require_width(self, rows: Tensor) -> None:
        """Raise unless the number of features is that of the first batch."""
        if rows.shape[1] != self.width:
            raise ValueError(
                f"{self.layer_call} had {self.width} features per sample in the first batch and now has"
                f" {rows.shape[1]}; pass pool='mean' for one feature per channel"
            )

    def moved(self, x: Tensor) -> Tensor:
        """Features in float64 minus the origin, which is the mean of those in the first call."""
        x = x.double()
        if self._origin is None:
            self._origin = x.mean(0)
        return x - self._origin

    def groups(self, x: Tensor, last: bool = False) -> Sequence[Tensor]:
        """The samples in groups; too few for a group wait for the next batch."""
        if self._rest is not None:
            x = torch.cat([self._rest, x])
        self._rest = None
        if len(x) < GROUP_LEAST and not last:
            self._rest = x.clone()
            return ()
        if len(x) <= GROUP_MOST:
            return (x,) if len(x) >= LEAST else ()
        return x.tensor_split(-(-len(x) // GROUP_MOST))

    def last_groups(self) -> Sequence[Tensor]:
        """The same for samples still waiting after the last batch; fewer than four are dropped."""
        return () if self._rest is None else self.groups(self._rest[:0], last=True)

    def begin(self, mean: Tensor) -> None:
        """Make the mean of a group the origin, if it is the first."""
        if self._origin is None:
            self._origin = mean


class Products:
    """The inner products of samples, of layers as they come: those of the same shape are multiplied together.

    Until then their groups wait in one buffer, relative to their means: a device is called once for all of them, and
    a processor does not lose its cache to a product within every layer of a model.
    """

    def __init__(self) -> None:
        self.grams: list[list[Tensor]] = []  # by layer, then by group
        self._buffer: Tensor | None = None
        self._taken = 0
        self._waiting: list[tuple[Tensor, list[Tensor]]] = []

    def add(self, layer: LayerFeatures, groups: Sequence[Tensor]) -> None:
        """Add the next layer."""
        self.grams.append([])
        for x in groups:
            mean = x.mean(0, dtype=_computed(x.dtype))
            layer.begin(mean)
            self._waiting.append((torch.sub(x, mean, out=self._room(x.shape, mean)), self.grams[-1]))

    def settle(self) -> list[list[Tensor]]:
        """The inner products of all layers since the last call."""
        self._multiply()
        grams, self.grams = self.grams, []
        return grams

    def _room(self, shape: torch.Size, like: Tensor) -> Tensor:
        """An uninitialized tensor, next to the one before if it fits into the buffer."""
        size, most = shape.numel(), _HELD // like.itemsize
        buffer = self._buffer
        if buffer is None or (buffer.dtype, buffer.device) != (like.dtype, like.device):
            self._multiply()
            buffer = self._buffer = like.new_empty(most)
        if self._taken + size > most:
            self._multiply()
        if size > most:
            return like.new_empty(shape)
        self._taken += size
        return buffer[self._taken - size : self._taken].view(shape)

    def _multiply(self) -> None:
        for (count, width), alike in groupby(self._waiting, lambda one: one[0].shape):
            centred, grams = zip(*alike, strict=True)
            first = centred[0]
            together = first.as_strided((len(centred), count, width), (count * width, width, 1))
            with in_full(first.device):
                products = _inner_products(together)
            for found, gram in zip(grams, products.unbind(), strict=True):
                found.append(gram)
        self._waiting.clear()
        self._taken = 0


class PairMoments:
    """The exact moments of every pair of layers of two models, or of one model with itself."""

    def __init__(self, left: Sequence[LayerFeatures], right: Sequence[LayerFeatures], device: torch.device) -> None:
        self._layers = left, right
        widths = [[layer.width for layer in layers] for layers in self._layers]
        self.left, self.right = (_slices(side) for side in widths)
        self._cross = torch.zeros(*(_size(side) for side in widths), dtype=torch.float64, device=device)
        self._own = [[self._cross.new_zeros(width + 2, width + 2) for width in side] for side in widths]
        self._waiting: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []

    def add(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Add the features of a batch, one tensor per layer; pass the same list twice for one model with itself."""
        self._waiting.append((left, right))
        if sum(len(x) for (x, *_), _ in self._waiting) >= _ROWS:
            self.settle()

    def settle(self) -> None:
        """Add the samples that still wait."""
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
        """The moments of a layer of the left (0) or right (1) model with itself."""
        return self._own[side][layer]

    def _widened(self, batches: Sequence[Sequence[Tensor]], side: int) -> Tensor:
        """The widened features of all layers, one row per sample; also adds each layer to its own moments."""
        features = zip(self._layers[side], zip(*batches, strict=True), strict=True)
        found = [widened(layer.moved(torch.cat(parts)).to(self._cross.device)) for layer, parts in features]
        for moments, z in zip(self._own[side], found, strict=True):
            moments += z.T @ z
        return torch.cat(found, 1)


class Alignments:
    """How inner products of samples agree between every pair of layers: unbiased estimates, summed over groups."""

    def __init__(self, left: int, right: int, device: torch.device) -> None:
        self.cross = torch.zeros(left, right, dtype=torch.float64, device=device)
        self.own = [self.cross.new_zeros(left), self.cross.new_zeros(right)]
        self.raw = [self.cross.new_zeros(left), self.cross.new_zeros(right)]  # before centring
        self.samples = 0

    def add(self, left: Sequence[Sequence[Tensor]], right: Sequence[Sequence[Tensor]]) -> None:
        """Add the groups of a batch, for each layer."""
        for grams in zip(self._stacked(left), self._stacked(right), strict=True):
            x, y = (u_centred(gram).flatten(1) for gram in grams)
            self.cross += x @ y.T
            for side, (centred, gram) in enumerate(zip((x, y), grams, strict=True)):
                self.own[side] += _square(centred)
                self.raw[side] += _square(gram.flatten(1))
            self.samples += grams[0].shape[-1]

    def _stacked(self, layers: Sequence[Sequence[Tensor]]) -> Iterator[Tensor]:
        """Group by group, the inner products in all layers."""
        for groups in zip(*layers, strict=True):
            yield torch.stack([group.to(self.cross.device) for group in groups])


def exact_width(left: Sequence[int], right: Sequence[int], max_bytes: int) -> int:
    """The largest width up to which the moments of all layers fit into `max_bytes`; 0 if none do.

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
    """Multiply matrices in the full precision of their dtype, whatever autocast and TF32 settings say."""
    backends: Any = torch.backends
    backend = backends.cuda.matmul if device.type == "cuda" else backends.mkldnn.matmul
    before = backend.fp32_precision
    try:
        backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        backend.fp32_precision = before


def _inner_products(x: Tensor) -> Tensor:
    """`x @ x.mT`. It is symmetric, so that a CPU computes little more than the half above the diagonal."""
    count = x.shape[1]
    if x.device.type != "cpu":
        return x @ x.mT
    products = x.new_empty(len(x), count, count)
    for start in range(0, count, _STRIP):
        stop = min(start + _STRIP, count)
        products[:, start:stop, start:] = x[:, start:stop] @ x[:, start:].mT
        products[:, stop:, start:stop] = products[:, start:stop, stop:].mT
    return products


def _computed(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which features of another dtype are multiplied."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _square(x: Tensor) -> Tensor:
    """The sum of squares of every row, in float64 and without a copy of `x`."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    return norms.square()


def _slices(widths: Sequence[int]) -> list[slice]:
    """Where the moments of each layer begin and end."""
    ends = list(accumulate((width + 2 for width in widths), initial=0))
    return [slice(*ends[number : number + 2]) for number in range(len(widths))]


def _size(widths: Sequence[int]) -> int:
    return sum(width + 2 for width in widths)
