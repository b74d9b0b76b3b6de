"""Recordings as sides of a comparison: the ranks of one joined, and several steps compared one after the other."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

from torchhook.captures.agreement.evidence import in_words
from torchhook.captures.agreement.paired_runs import Side
from torchhook.captures.agreement.pairs import renaming
from torchhook.captures.agreement.recorded_run import Location, RecordedRun, in_order_of
from torchhook.captures.agreement.rounding import comparable, gap, precision, shapes_of
from torchhook.compare.diff.comparison import NO_BATCH, Comparison
from torchhook.compare.diff.fused import copied
from torchhook.compare.diff.match import Match
from torchhook.compare.diff.result import Difference
from torchhook.compare.diff.sides import matched_sides, require_fitting
from torchhook.compare.diff.updates import diff_updates
from torchhook.compare.recordings.ranks import Shape, joined
from torchhook.compare.recordings.recording import RecordedRank, Recording, Turn
from torchhook.core.batch import Batch, Loss
from torchhook.core.site import Site
from torchhook.core.trees import Arguments

_ROUNDING = 2.0  # rounding errors by which the inputs of the two may differ


class Recorded:
    """A side that was recorded, by one or by several ranks."""

    def __init__(self, recordings: Sequence[Recording], name: str) -> None:
        self.ranks: list[RecordedRank] = [rank for recording in recordings for rank in recording.ranks]
        self.name = name  # "a" or "b"

    @property
    def turns(self) -> list[Turn]:
        """The passes that were recorded, of all ranks."""
        return list(dict.fromkeys(turn for rank in self.ranks for turn in rank.turns)) or [self.first]

    @property
    def first(self) -> Turn:
        """The first pass."""
        return self.ranks[0].first

    @property
    def modules(self) -> set[str]:
        """The paths of all modules, of all ranks."""
        return {path for rank in self.ranks for path in rank.about.modules}

    @property
    def called(self) -> set[str]:
        """The paths of the modules that returned something in any pass."""
        return {line.path for rank in self.ranks for line in rank.lines if line.port == "output"}

    def alone(self) -> Iterator[Recorded]:
        """Each rank by itself."""
        for rank in self.ranks:
            one = Recorded((), self.name)
            one.ranks = [rank]
            yield one

    def inputs(self) -> Arguments:
        """The arguments of the model in the first pass."""
        return self.ranks[0].inputs(None)

    def side(self, like: RecordedRun | None, match: Match, turn: Turn | None = None, after: bool = False) -> Side:
        """One pass (None: the first) in the shapes of `like`, the run that it is compared with.

        It has the parameters before its step, or `after` it.
        """
        at = self.first if turn is None else turn
        return Side(joined(self.ranks, at, like, partial(self._expected, like, self._renamed(like, match)), after))

    def is_cut(self, turn: Turn) -> bool:
        """Whether the recording of a pass ends before the model returned, of any rank."""
        return any(rank.is_cut(turn) for rank in self.ranks)

    def has_update(self, step: int) -> bool:
        """Whether the parameters after a step were recorded."""
        return any(line.port == "param" and line.step == step + 1 for rank in self.ranks for line in rank.lines)

    def _renamed(self, like: RecordedRun | None, match: Match) -> dict[str, str]:
        """What the user says that modules of this side are called in the other one."""
        if like is None:
            return {}
        a, b = (self.modules, like.modules) if self.name == "a" else (like.modules, self.modules)
        plain = [(pair.a[0], pair.b[0]) for pair in match.expanded(a, b) if len(pair.a) == len(pair.b) == 1]
        return dict(plain) if self.name == "a" else {theirs: mine for mine, theirs in plain}

    def _expected(self, like: RecordedRun | None, renamed: dict[str, str], at: Location) -> Sequence[Shape | None]:
        if like is None:
            return ()
        there = at._replace(site=Site(renaming(at.site.path, renamed), at.site.port))
        found = like.observations.get(there)
        return () if found is None else shapes_of(found.tensors)


def compared(
    a: Side,
    b: Side,
    match: Match,
    tolerance: float | None,
    batch: Batch = NO_BATCH,
    loss: Loss | None = None,
    ranks: tuple[int, int] = (1, 1),
    trusting: bool = False,
) -> Difference:
    """Where two sides diverge in one pass."""
    if (other := _different_inputs(a.run, b.run)) is not None:
        return other
    sides = matched_sides(a, b, match, ranks)
    comparison = Comparison(sides, batch, loss, trusting)
    return comparison.judged() if tolerance is None else comparison.within(tolerance)


def diff_recordings(a: Recorded, b: Recorded, match: Match, tolerance: float | None) -> Difference:
    """The first pass in which two recordings diverge; of each step forward, then backward, then the update."""
    if 1 < len(a.ranks) != len(b.ranks) > 1:
        raise ValueError(
            f"a has {len(a.ranks)} ranks and b {len(b.ranks)}: compare each of them with a recording of one process"
        )
    if len(a.ranks) > 1 < len(b.ranks):
        return _rank_by_rank(a, b, match, tolerance)
    turns = list(zip(a.turns, b.turns, strict=False))
    require_fitting(match, (a.modules, b.modules), (a.called, b.called))
    cut: dict[str, None] = {}
    several = len(a.turns) > 1 or len(b.turns) > 1
    for number, (mine, theirs) in enumerate(turns):
        found = _diff_turn(a, b, mine, theirs, match, tolerance)
        is_last = number + 1 == len(turns) or turns[number + 1][0].step != mine.step
        if found.same and is_last and a.has_update(mine.step) and b.has_update(theirs.step):
            found = _diff_update(a, b, mine, theirs, match, found)
        cut |= dict.fromkeys(one.name for one, turn in ((a, mine), (b, theirs)) if one.is_cut(turn))
        if not found.same:
            break
    if several:
        found = replace(found, step=None if found.same else mine.step, verdict=_with_step(found, mine, len(turns)))
    if len(a.turns) != len(b.turns):
        found = replace(found, notes=(*found.notes, f"a has {_passes(len(a.turns))}, and b {len(b.turns)}"))
    return as_far_as_known(found, cut)


def as_far_as_known(found: Difference, cut: Collection[str]) -> Difference:
    """`found`, where the recordings of some sides end before the model returned."""
    if not cut:
        return found
    ends = f"{' and '.join(cut)} end{'s' if len(cut) == 1 else ''} before the model returned"
    if not found.same:
        return replace(found, notes=(*found.notes, ends))
    return replace(found, complete=False, verdict=f"{found.verdict}; but {ends}", notes=(*found.notes, ends))


def _rank_by_rank(a: Recorded, b: Recorded, match: Match, tolerance: float | None) -> Difference:
    """Where the first of as many ranks on both sides diverges; what others compute from its values diverges later."""
    pairs = zip(a.alone(), b.alone(), strict=True)
    results = [diff_recordings(*pair, match, tolerance) for pair in pairs]
    number = min(range(len(results)), key=lambda number: _when(results[number]))
    found = results[number]
    if found.same:
        return next((one for one in results if not one.complete), found)
    return replace(found, verdict=f"rank {number}: {found.verdict}")


def _when(found: Difference) -> tuple[bool, int, int]:
    """When a result diverges, for comparison with others."""
    paths = [row.site.path for row in found.rows]
    at = paths.index(found.first.path) if found.first is not None and found.first.path in paths else 0
    return found.same, found.step or 0, at


def _diff_turn(a: Recorded, b: Recorded, mine: Turn, theirs: Turn, match: Match, tolerance: float | None) -> Difference:
    first, second = _both(a, b, mine, theirs, match)
    ranks = len(a.ranks), len(b.ranks)
    return compared(first, second, match, tolerance, ranks=ranks, trusting=mine.step > a.first.step)


def _both(a: Recorded, b: Recorded, mine: Turn, theirs: Turn, match: Match, after: bool = False) -> tuple[Side, Side]:
    """One pass of each; that of several ranks is joined in the shapes of the other."""
    if len(a.ranks) > 1:
        second = b.side(None, match, theirs, after)
        return a.side(second.run, match, mine, after), second
    first = a.side(None, match, mine, after)
    return first, b.side(first.run, match, theirs, after)


def _diff_update(a: Recorded, b: Recorded, mine: Turn, theirs: Turn, match: Match, found: Difference) -> Difference:
    """What `found` becomes if the optimizers did something else in the step."""
    ranks = len(a.ranks), len(b.ranks)
    before, after = (_both(a, b, mine, theirs, match, late) for late in (False, True))
    gradients = Side(_with_gradients(before[0].run)), Side(_with_gradients(before[1].run))
    first, second, third = (matched_sides(*pair, match=match, ranks=ranks) for pair in (before, after, gradients))
    return diff_updates(first, second, third, found)


def _with_gradients(run: RecordedRun) -> RecordedRun:
    """The same run with gradients in place of parameters, which are split and turned around in the same way."""
    twin = copied(run)
    twin.parameters = {observed.location.site.path: observed.tensors[0] for observed in run.of("param_grad")}
    return twin


def _with_step(found: Difference, turn: Turn, turns: int) -> str:
    return f"{_passes(turns)}: {found.verdict}" if found.same else f"step {turn.step}: {found.verdict}"


def _passes(count: int) -> str:
    return f"{count} pass{'' if count == 1 else 'es'}"


def _different_inputs(a: RecordedRun, b: RecordedRun) -> Difference | None:
    """The verdict if the models were not run on the same input, as far as both say."""
    at = Location(Site("", "input"), 0)
    mine, theirs = a.observations.get(at), b.observations.get(at)
    if mine is None or theirs is None or not mine.tensors or not theirs.tensors:
        return None
    theirs = in_order_of(theirs, mine)
    shapes = [shapes_of(one.tensors)[0] for one in (mine, theirs)]
    if math.prod(shapes[0] or ()) != math.prod(shapes[1] or ()):
        return _inputs_differ(f"the first one is {in_words(shapes[:1])} in a, and {in_words(shapes[1:])} in b")
    count = max(
        1, comparable(mine.tensors, theirs.tensors)
    )  # of token ids, the number has to be the same, not the shape
    for number in range(count):
        pair = mine.tensors[number], theirs.tensors[number]
        apart = gap(*pair)
        if apart.error > _ROUNDING * precision(pair):
            where = f" at ({', '.join(map(str, apart.worst))})" if apart.worst else ""
            return _inputs_differ(f"{apart.values[0]:.6g} in a and {apart.values[1]:.6g} in b{where} of input {number}")
    return None


def _inputs_differ(how: str) -> Difference:
    return Difference(Site("", "input"), "", f"the inputs differ: {how}")
