"""Which part of a tensor in one run should equal which part in another, told by how its sizes differ between runs.

Each function returns a `Pairing`. A dimension may hold the positions of several samples one after the other, as where a
model flattens its tokens; then it is taken apart in every way that fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

from torch import Tensor

from torchhook.captures.agreement.free_runs import Pairing, Views


class Cut(NamedTuple):
    """A range of one dimension. If that holds `outer` groups, it is cut inside each of them, or groups are taken."""

    start: int
    length: int
    outer: int = 0
    inside: bool = True

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The range of `x`."""
        if not self.outer:
            return x.narrow(dim, self.start, self.length)
        groups: Tensor = x.unflatten(dim, (self.outer, x.shape[dim] // self.outer))
        return groups.narrow(dim + self.inside, self.start, self.length)


Choice = tuple[Cut | None, Cut | None]
"""How to cut a dimension of each of two tensors."""


def same(a: Tensor, b: Tensor, _: Tensor | None) -> Views:
    """All of both, if they have the same shape."""
    return [(a, b)] if a.shape == b.shape else []


def by_sample(count: int, more: int, number: int, other: int) -> Pairing:
    """Sample `number` of the first run and `other` of the second, of `count` each; the reference has `more`."""

    def pair(a: Tensor, b: Tensor, reference: Tensor | None) -> Views:
        dim = _sample_dim(a, reference, count, more)
        if a.shape != b.shape or dim is None:
            return []
        size = a.shape[dim] // count
        layouts = [(count, False), (size, True)] if size > 1 else [(0, True)]
        return _views(a, b, {dim: [(Cut(number, 1, *layout), Cut(other, 1, *layout)) for layout in layouts]})

    return pair


def turned(count: int, more: int) -> Pairing:
    """All of both runs, of which the second has the `count` samples in reverse order; the reference has `more`."""

    def pair(a: Tensor, b: Tensor, reference: Tensor | None) -> Views:
        dim = _sample_dim(a, reference, count, more)
        if a.shape != b.shape or dim is None:
            return []
        mine, other = (_samples(x, dim, count) for x in (a, b))
        return [(x, y.flip(dim)) for x, y in zip(mine, other, strict=True)]

    return pair


def shortened_sample(count: int, more: int, number: int) -> Pairing:
    """Sample `number` of the first run, and the beginning of it in the second; the reference has `more` samples."""

    def pair(a: Tensor, b: Tensor, reference: Tensor | None) -> Views:
        dim = _sample_dim(a, reference, count, more)
        if a.dim() != b.dim() or dim is None or b.shape[dim] % count:
            return []
        mine, other = ([x.select(dim, number) for x in _samples(x, dim, count)] for x in (a, b))
        return [view for x, y in zip(mine, other, strict=True) for view in shortened(1)(x, y, None)]

    return pair


def shortened(count: int, at_end: bool = False) -> Pairing:
    """All of the first run, and as much of the beginning (or the end) of the second, whose sequences are longer."""

    def pair(a: Tensor, b: Tensor, _: Tensor | None) -> Views:
        if a.dim() != b.dim():
            return []
        choices: dict[int, list[Choice]] = {}
        for dim in _differing(a, b):
            size, longer = a.shape[dim], b.shape[dim]
            if longer < size:
                return []
            choices[dim] = [(None, Cut(longer - size if at_end else 0, size))]
            if count > 1 and not size % count and not longer % count:
                own, extra = size // count, (longer - size) // count
                choices[dim].append((Cut(0, own, count), Cut(extra if at_end else 0, own, count)))
        return _views(a, b, choices)

    return pair


def until(stop: int, count: int, length: int) -> Pairing:
    """The positions before `stop` of both runs, of `length` each; those of the reference are one shorter."""

    def pair(a: Tensor, b: Tensor, reference: Tensor | None) -> Views:
        dims = _differing(a, reference)
        if a.shape != b.shape or reference is None or not dims:
            return []
        choices: dict[int, list[Choice]] = {}
        for dim in dims:
            cuts = [Cut(0, min(stop, a.shape[dim]))] if a.shape[dim] - reference.shape[dim] == 1 else []
            if a.shape[dim] == count * length and reference.shape[dim] == count * (length - 1):
                cuts += [Cut(0, stop, count), Cut(0, stop, length, inside=False)]
            choices[dim] = [(cut, cut) for cut in cuts]
        return _views(a, b, choices)

    return pair


def chunk(begin: int, end: int, count: int, length: int, earlier: bool = True) -> Pairing:
    """Positions `begin` to `end` of the first run, of `length` in all, and all of the second, which has only those.

    What has the positions before `begin`, too, like the keys of a cache, is compared if `earlier` ones are.
    """
    width = end - begin

    def pair(a: Tensor, b: Tensor, _: Tensor | None) -> Views:
        dims = _differing(a, b)
        if a.dim() != b.dim() or not dims:
            return []
        known: dict[tuple[int, int], Choice] = {
            (length, end): (Cut(0, end), None),
            (length, width): (Cut(begin, width), None),
            (count * length, count * width): (Cut(begin, width, count), Cut(0, width, count)),
        }
        sizes = {dim: (a.shape[dim], b.shape[dim]) for dim in dims}
        if not earlier and set(sizes.values()) == {(length, end)}:
            return []
        return _views(a, b, {dim: [known[both]] if both in known else [] for dim, both in sizes.items()})

    return pair


def from_pack(rows: Tensor, total: int, number: int, count: int) -> Pairing:
    """All of the first run, of one sequence, and the same sequence in the second: `rows` of its packed tensors."""

    def pair(a: Tensor, b: Tensor, _: Tensor | None) -> Views:
        if a.dim() != b.dim() or not a.is_floating_point():
            return []
        for dim in _differing(a, b):
            if (a.shape[dim], b.shape[dim]) == (len(rows), total):
                b = b.index_select(dim, rows.to(b.device))
            elif (a.shape[dim], b.shape[dim]) == (1, count):
                b = b.narrow(dim, number, 1)
            else:
                return []
        return [(a, b)]

    return pair


def _views(a: Tensor, b: Tensor, choices: Mapping[int, Sequence[Choice]]) -> Views:
    """Both tensors, cut in every combination of the choices for each dimension."""
    views = []
    for chosen in product(*choices.values()):
        x, y = a, b
        for dim, (mine, other) in reversed(list(zip(choices, chosen, strict=True))):
            x = x if mine is None else mine.of(x, dim)
            y = y if other is None else other.of(y, dim)
        views.append((x, y))
    return views


def _sample_dim(a: Tensor, reference: Tensor | None, count: int, more: int) -> int | None:
    """The dimension that holds `count` samples, or groups of as many, and `more` in the reference."""
    dims = _differing(a, reference)
    if reference is None or len(dims) != 1:
        return None
    (dim,) = dims
    size, rest = divmod(a.shape[dim], count)
    return None if rest or reference.shape[dim] != size * more else dim


def _samples(x: Tensor, dim: int, count: int) -> list[Tensor]:
    """The samples along a dimension of their own, before what they have several of: in groups, or taken in turns."""
    return [x.unflatten(dim, (count, -1)), x.unflatten(dim, (-1, count)).transpose(dim, dim + 1)]


def _differing(a: Tensor, b: Tensor | None) -> list[int]:
    """The dimensions in which two tensors differ in size."""
    if b is None or a.dim() != b.dim():
        return []
    return [dim for dim in range(a.dim()) if a.shape[dim] != b.shape[dim]]
