"""The two sides of a comparison in the same terms: what one computes at once is taken apart, and names are matched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torchhook.captures.agreement.evidence import in_words
from torchhook.captures.agreement.paired_runs import Side, student_of
from torchhook.captures.agreement.pairs import renaming
from torchhook.captures.agreement.recorded_run import Location, RecordedRun
from torchhook.captures.agreement.rounding import are_alike, shapes_of
from torchhook.compare.diff.found import fusions, prefix
from torchhook.compare.diff.fused import copied, is_turned, join, oriented, reorder, split
from torchhook.compare.diff.match import Counterparts, Match
from torchhook.core.site import Site


class Sides(NamedTuple):
    """Two runs in the same terms, what paths of a are called in b, and the entries of the map that were used."""

    a: Side
    b: Side
    renamed: Mapping[str, str]
    pairs: tuple[Counterparts, ...]


def matched_sides(a: Side, b: Side, match: Match, ranks: tuple[int, int] = (1, 1)) -> Sides:
    """Bring two sides into the same terms, by the map that the user has given and what can be found.

    `ranks` says of how many ranks each side was joined: then parts of what is computed at once come rank by rank.
    """
    given = match.expanded(a.run.modules, b.run.modules)
    plain = {pair.a[0]: pair.b[0] for pair in given if len(pair.a) == len(pair.b) == 1}
    for mine, other in plain.items():
        _require_alike(a.run, b.run, mine, other)
    renamed = {**prefix(a.run.modules, b.run.modules), **plain}
    fused = [pair for pair in given if not pair.is_plain]
    taken = {path for pair in fused for path in (*pair.a, *pair.b)}
    found = [pair for pair in fusions(a.run, b.run, renamed) if not taken & {*pair.a, *pair.b}]
    runs = copied(a.run), copied(b.run)
    swapped = student_of(a, b)
    for pair in (*fused, *found):
        whole = ranks[0] if len(pair.a) == 1 else ranks[1]
        by_rank = replace(pair, heads=whole) if whole > 1 and pair.heads is None else pair
        renamed |= _translated(runs, by_rank, swapped)
    _orient(runs, renamed)
    return Sides(Side(runs[0], a.model), Side(runs[1], b.model), renamed, (*given, *found))


def _require_alike(a: RecordedRun, b: RecordedRun, mine: str, other: str) -> None:
    """Raise if two layers that a map pairs return tensors of different shapes."""
    found = [run.observations.get(Location(Site(path), 0)) for run, path in ((a, mine), (b, other))]
    shapes = [shapes_of(one.tensors) for one in found if one is not None and one.module.is_leaf]
    if len(shapes) == 2 and shapes[0] and shapes[1] and not are_alike(shapes[0][0], shapes[1][0]):
        words = [in_words(one) for one in shapes]
        raise ValueError(f"match: {mine!r} returns {words[0]} in a, and {other!r} {words[1]} in b")


def _translated(runs: tuple[RecordedRun, RecordedRun], pair: Counterparts, swapped: bool | None) -> dict[str, str]:
    """Put one run into the terms of the other; a student, which has to run again, keeps its own. Returns new names."""
    a, b = runs
    if len(pair.a) == len(pair.b) == 1:
        assert pair.rotary is not None
        if swapped:
            reorder(b, pair.b[0], pair.rotary, interleave=False)
        else:
            reorder(a, pair.a[0], pair.rotary, interleave=True)
        return {}
    if len(pair.a) == 1:
        if swapped:  # a, which computes them at once, has to run again
            return {pair.a[0]: join(b, pair, pair.b, pair.a[0], a)}
        return {part: path for path, part in split(a, pair, pair.a[0], pair.b, b).items()}
    if swapped is False:
        return {join(a, pair, pair.a, pair.b[0], b): pair.b[0]}
    return split(b, pair, pair.b[0], pair.a, a)


def _orient(runs: tuple[RecordedRun, RecordedRun], renamed: Mapping[str, str]) -> None:
    """Turn the weights of a's layers around where only one of the two models has them inputs × outputs."""
    a, b = runs
    for path, facts in list(a.modules.items()):
        other = b.modules.get(renaming(path, renamed))
        if other is not None and is_turned(facts) != is_turned(other) and "weight" in facts.parameters:
            oriented(a, path)
