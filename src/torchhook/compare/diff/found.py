"""Finds which modules of a are which of b where their names differ: by names, shapes and order, never by values.

What pairs calls one by one is in `captures/agreement/pairs.py`. Here is what comes before: a prefix that one model has
before all names, and layers that one model computes at once and the other one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from torchhook.captures.agreement.pairs import Call, renaming
from torchhook.captures.agreement.recorded_run import Observation, RecordedRun
from torchhook.captures.agreement.rounding import shapes_of
from torchhook.compare.diff.match import Counterparts

_DEEPEST = 4  # names that a wrapper may put before all others
_MOST = 4  # layers that are computed at once
_AHEAD = 3  # layers that are passed over to find one that fits


def prefix(a: Collection[str], b: Collection[str]) -> dict[str, str]:
    """What to rename if one model is inside a wrapper: all of its names begin alike, and else are those of the other.

    >>> prefix(["fc", "fc.0"], ["base.model", "base.model.fc", "base.model.fc.0"])
    {'': 'base.model'}
    """
    same = len(set(a) & set(b) - {""})
    outer_a, outer_b = _outer(a, b), _outer(b, a)
    if outer_a and outer_a[1] > max(same, outer_b[1] if outer_b else 0):
        return {outer_a[0]: ""}
    return {"": outer_b[0]} if outer_b and outer_b[1] > same else {}


def fusions(a: RecordedRun, b: RecordedRun, renamed: Mapping[str, str]) -> Iterator[Counterparts]:
    """The layers that one model computes at once and the other one by one, in the order of execution."""
    names = {renaming(call.path, renamed) for call in _layers(a)}
    theirs = _layers(b)
    known = names & {call.path for call in theirs}
    mine = [(call, one) for call, one in _layers(a).items() if renaming(call.path, renamed) not in known]
    others = [(call, one) for call, one in theirs.items() if call.path not in known]
    found: dict[Counterparts, None] = {}
    i = j = 0
    while i < len(mine) and j < len(others):
        if (count := _fused(mine[i][1], [one for _, one in others[j : j + _MOST]])) > 1:
            found[Counterparts((mine[i][0].path,), tuple(call.path for call, _ in others[j : j + count]))] = None
            i, j = i + 1, j + count
        elif (count := _fused(others[j][1], [one for _, one in mine[i : i + _MOST]])) > 1:
            found[Counterparts(tuple(call.path for call, _ in mine[i : i + count]), (others[j][0].path,))] = None
            i, j = i + count, j + 1
        else:
            i, j = _next(i, j, [one for _, one in mine], [one for _, one in others])
    return iter(found)


def _outer(inside: Collection[str], other: Collection[str]) -> tuple[str, int] | None:
    """The prefix of `inside` without which most of its names are those of `other`, and how many are."""
    known, counts = set(other) - {""}, Counter[str]()
    for path in inside:
        names = path.split(".")
        for depth in range(1, min(_DEEPEST, len(names) - 1) + 1):
            counts[".".join(names[:depth])] += ".".join(names[depth:]) in known
    best = counts.most_common(1)
    return best[0] if best and best[0][1] else None


def _layers(run: RecordedRun) -> dict[Call, Observation]:
    """The calls of layers with parameters, in order."""
    return {
        Call(output.location.site.path, output.location.call): output
        for output in run.of("output")
        if output.module.is_leaf and output.module.parameters
    }


def _fused(whole: Observation, parts: Sequence[Observation]) -> int:
    """How many of `parts`, from the first on, return together what `whole` returns, with as many parameters; else 0."""
    shapes = [_shape(one) for one in (whole, *parts)]
    if not shapes[0]:
        return 0
    width = size = 0
    for number, (shape, part) in enumerate(zip(shapes[1:], parts, strict=True), 1):
        if not shape or shape[:-1] != shapes[0][:-1]:
            return 0
        width, size = width + shape[-1], size + part.module.size
        if width >= shapes[0][-1]:
            return number if width == shapes[0][-1] and size == whole.module.size else 0
    return 0


def _next(i: int, j: int, mine: Sequence[Observation], others: Sequence[Observation]) -> tuple[int, int]:
    """Where to go on: behind two layers that are alike, or past some that have no counterpart."""
    for skipped in range(_AHEAD):
        for at, other in ((i, j + skipped), (i + skipped, j)):
            if at < len(mine) and other < len(others) and _alike(mine[at], others[other]):
                return at + 1, other + 1
    return i + 1, j + 1


def _alike(a: Observation, b: Observation) -> bool:
    return _shape(a) == _shape(b) and a.module.size == b.module.size


def _shape(output: Observation) -> tuple[int, ...]:
    shapes = shapes_of(output.tensors)
    return (shapes[0] or ()) if len(shapes) == 1 else ()
