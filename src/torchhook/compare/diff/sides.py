"""The two sides of a comparison in the same terms: what one computes at once is taken apart, and names are matched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
    given = [
        pair
        for pair in match.expanded(a.run.modules, b.run.modules)
        if _are_called(pair, a.run.called, b.run.called)  # some may only be called in other passes
    ]
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
    return Sides(Side(runs[0], a.model), Side(runs[1], b.model), renamed, (*given, *found))


def require_fitting(
    match: Match, modules: tuple[Collection[str], Collection[str]], called: tuple[Collection[str], Collection[str]]
) -> None:
    """Raise if an entry of a map pairs modules of which none is ever called, or what another entry has paired.

    `modules` are the paths of all modules of a and of b, and `called` those of which a call is known.
    """
    taken: tuple[set[str], set[str]] = set(), set()
    for pair in match:
        expanded = list(Match([pair]).expanded(*modules))
        for one in expanded:
            _require_free(one.a, taken[0], "a")
            _require_free(one.b, taken[1], "b")
        if not any(_are_called(one, *called) for one in expanded):
            shown = " and ".join(" + ".join(paths) for paths in (pair.a, pair.b))
            raise ValueError(f"match: {shown}: no calls of both, or of what they have inside, are known")


def _require_free(paths: Sequence[str], taken: set[str], which: str) -> None:
    for path in paths:
        if path in taken:
            raise ValueError(f"match: {path!r} of {which} is in two entries, or twice in one")
        taken.add(path)


def _are_called(pair: Counterparts, a: Collection[str], b: Collection[str]) -> bool:
    """Whether all modules of an entry are called; for a plain one, calls of the same name inside of it are enough."""
    if len(pair.a) == len(pair.b) == 1 and not (pair.a[0] in a and pair.b[0] in b):
        renamed = {pair.a[0]: pair.b[0]}
        return any(path.startswith(f"{pair.a[0]}.") and renaming(path, renamed) in b for path in a)
    return set(pair.a) <= set(a) and set(pair.b) <= set(b)


def _require_alike(a: RecordedRun, b: RecordedRun, mine: str, other: str) -> None:
    """Raise if two modules that a map pairs return tensors of different shapes."""
    found = [run.observations.get(Location(Site(path), 0)) for run, path in ((a, mine), (b, other))]
    shapes = [shapes_of(one.tensors) for one in found if one is not None]
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


def orient(a: RecordedRun, b: RecordedRun, renamed: Mapping[str, str]) -> None:
    """Turn the weights of a's layers around where only one of the two models has them inputs × outputs."""
    for path, facts in list(a.modules.items()):
        other = b.modules.get(renaming(path, renamed))
        if other is not None and is_turned(facts) != is_turned(other) and "weight" in facts.parameters:
            oriented(a, path)
