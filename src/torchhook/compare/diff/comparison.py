"""Two models compared on one batch: one row per location, and the verdict in a sentence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torchhook.captures.agreement.evidence import ComparedTensor, ShapeMismatch, in_words
from torchhook.captures.agreement.paired_runs import Judgement, PairedRuns
from torchhook.captures.agreement.pairs import unmatched
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun, is_compiled
from torchhook.captures.agreement.rounding import comparable, gap
from torchhook.compare.diff.fits import better_fits
from torchhook.compare.diff.fused import real_module
from torchhook.compare.diff.match import used
from torchhook.compare.diff.names import Names, explanation
from torchhook.compare.diff.result import Difference, Row, place_of
from torchhook.compare.diff.sides import Sides, orient
from torchhook.core.batch import Batch, Loss
from torchhook.core.site import Site
from torchhook.core.trees import Arguments

_ROUTED = "rounding alone changes the shapes inside {}: what depends on them was not judged"
NO_BATCH = Batch(Arguments((), {}), None)  # of two recordings, neither model is run
Partners = defaultdict[str, dict[tuple[str, int], None]]
"""Of each module its counterparts, with the number by which their calls are later."""
_COMPILED = "{} is compiled: it was recompiled with taps inside, by the same backend with the same options"


class Comparison:
    """Two models that were run on the same batch, and what is known about their differences."""

    def __init__(self, sides: Sides, batch: Batch = NO_BATCH, loss: Loss | None = None, trusting: bool = False) -> None:
        self.sides = sides
        self.runs = PairedRuns(sides.a, sides.b, batch, loss, sides.renamed, trusting)
        orient(
            *self.runs.records, {mine.path: theirs.path for mine, theirs in reversed(self.runs.pairs.everyone.items())}
        )
        models = {"a": sides.a.model, "b": sides.b.model}
        self.compiled = [name for name, model in models.items() if model is not None and is_compiled(model)]
        self.notes = [_COMPILED.format(name) for name in self.compiled]
        graded = [name for name, run in (("a", sides.a.run), ("b", sides.b.run)) if _has_gradients(run)]
        if len(graded) == 1:
            self.notes.append(f"only {graded[0]} has gradients, so none were compared")

    def within(self, tolerance: float) -> Difference:
        """Diverge at the first row whose error is above `tolerance`."""
        rows = [replace(row, parts=not row.error <= tolerance) for row in self.rows()]
        first = next((row for row in rows if row.parts), None)
        if first is None:
            return self._result(rows, None, None, f"a and b agree: no relative error is above {tolerance:.2g}")
        off = _off(first.error, first.worst, first.values)
        verdict = f"a and b diverge at {_named(first)}: {off}, above {tolerance:.2g}"
        return self._result(rows, first.site, _owner(first.site), verdict)

    def judged(self) -> Difference:
        """Diverge at the first location that is off by more than rounding although its inputs are the same."""
        rows = list(self.rows())
        if not self.runs.pairs.misshapen and all(row.error == 0 for row in rows):
            return self._result(rows, None, None, f"a and b agree: {self._all} equal")
        if len(self.compiled) == 2:
            self.notes.append("both are compiled: column 'own error' is that of b uncompiled")
        judgement = self.runs.judged()
        names = Names(self.runs.pairs, self.runs.records[0].modules, judgement)
        for path in judgement.judge.random:
            self.notes.append(f"{path!r} was not judged: it drops different elements in each model")
        for path in judgement.judge.unjudged:
            self.notes.append(_ROUTED.format(names.of(names.module(path))))
        return self._with_verdict(rows, judgement, names)

    @property
    def _all(self) -> str:
        sketched = any(run.is_sketched for run in self.runs.records)
        return "all that the sketches keep is" if sketched else "all values are"

    def rows(self) -> Iterator[Row]:
        """One row per pair of values: outputs in execution order, then gradients in the order of the backward."""
        ours, theirs = self.runs.records
        find = self.runs.pairs.finder(from_a=True)
        order = ours.gradient_order()
        outputs = [output.location for output in ours.of("output")]
        for location in (*outputs, *sorted(order, key=order.__getitem__)):
            partner = find(location)
            mine, other = ours.find(location), theirs.find(partner) if partner else None
            if mine is not None and other is not None and (row := _row(mine, other)):
                yield row

    def _with_verdict(self, rows: list[Row], judgement: Judgement, names: Names) -> Difference:
        """The verdict, and the rows with the errors that the modules make by themselves."""
        rows = self._with_input(rows, judgement)
        own: dict[Location, list[ComparedTensor]] = {}
        for one in judgement.judge.compared:
            own.setdefault(judgement.in_both(one).a, []).append(one)
        rows = [_with_own(row, own.get(Location(row.site, row.call, row.leaf), [])) for row in rows]
        found = judgement.first
        if found is None:
            return self._result(rows, None, None, _agreed(rows))
        if isinstance(found, ShapeMismatch):
            shapes = reversed(found.shapes) if judgement.swapped else found.shapes
            off = f"not of the same shape: {' and '.join(map(in_words, shapes))}"
        else:
            off = _excess(found, judgement.swapped)
        before = judgement.judge.last_agreement(found)
        module, sentence = explanation(names, self.runs.records, found, before, off)
        tensors = None if isinstance(found, ShapeMismatch) else found.tensors
        module = real_module(self.runs.records[0], module, tensors)
        if isinstance(found, ComparedTensor):
            self.notes += better_fits(self.runs, judgement, found)
        number = next((number for number, row in enumerate(rows) if row.site.port == "input"), None)
        place = None if number is None else (number, rows.pop(number))
        return replace(self._result(rows, judgement.in_both(found).a.site, module, sentence), place=place)

    def _with_input(self, rows: list[Row], judgement: Judgement) -> list[Row]:
        """The rows, and one for the place where the models diverge if that is the input of a call."""
        both = None if judgement.first is None else judgement.in_both(judgement.first)
        if both is None or both.a.site.port != "input":
            return rows
        mine, theirs = (run.find(location) for run, location in zip(self.runs.records, both, strict=True))
        row = None if mine is None or theirs is None else _row(mine, theirs)
        order = {location: number for number, location in enumerate(self.runs.records[0].observations)}
        at = sum(order.get(Location(one.site, one.call, one.leaf), math.inf) < order[both.a] for one in rows)
        return rows if row is None else [*rows[:at], row, *rows[at:]]

    def _names(self) -> Iterator[tuple[str, str]]:
        """The paths of modules that were compared, in a and in b: those with one counterpart, call by call.

        Not what stands for a part or a union of some modules.
        """
        invented = {path for record in self.runs.records for path in record.stand_ins}
        partners: tuple[Partners, Partners] = defaultdict(dict), defaultdict(dict)
        for mine, theirs in self.runs.pairs.partners.items():
            shift = theirs.number - mine.number
            partners[0][mine.path][theirs.path, shift] = None
            partners[1][theirs.path][mine.path, -shift] = None
        for path, found in partners[0].items():
            (other, shift), *more = found
            if not (more or shift or len(partners[1][other]) > 1 or invented & {path, other}):
                yield path, other

    def _result(self, rows: list[Row], first: Site | None, module: str | None, verdict: str) -> Difference:
        a, b = (record.modules for record in self.runs.records)
        recorded = self.sides.a.model is None, self.sides.b.model is None
        lonely = unmatched(self.runs.pairs, a, b, recorded)
        match = used(self.sides.pairs, self._names(), a, b)
        return Difference(first, module, verdict, tuple(rows), tuple(lonely), tuple(self.notes), match=match)


def _has_gradients(run: RecordedRun) -> bool:
    return any("grad" in location.site.port for location in run.observations)


def _row(mine: Observation, other: Observation) -> Row | None:
    """The row of two values: of their tensors, the pair with the largest error."""
    count = comparable(mine.tensors, other.tensors)
    gaps = [gap(mine.tensors[number], other.tensors[number]) for number in range(count)]
    if not gaps:
        return None
    number = max(range(count), key=lambda number: gaps[number].error)
    worst, location = gaps[number], mine.location
    dtypes = dict.fromkeys(
        str(tensor.dtype).removeprefix("torch.") for tensor in (mine.tensors[number], other.tensors[number])
    )
    kinds = dict.fromkeys(observed.module.kind for observed in (mine, other))
    return Row(
        site=location.site,
        call=location.call,
        partner=other.location.site.path,
        kind="" if location.site.port == "param_grad" else "/".join(kinds),
        error=worst.error,
        cosine=worst.cosine,
        worst=worst.worst,
        values=worst.values,
        dtype="/".join(dtypes),
        leaf=location.leaf,
    )


def _with_own(row: Row, compared: list[ComparedTensor]) -> Row:
    if not compared:
        return row
    worst = max(compared, key=lambda one: (one.diverges, one.gap.error))
    explained = worst.explained / worst.gap.scale if worst.gap.scale else math.inf
    return replace(row, own=worst.gap.error, explained=explained, parts=worst.diverges)


def _named(row: Row) -> str:
    return f"{place_of(row.site, row.call)} ({row.kind})" if row.kind else place_of(row.site, row.call)


def _owner(site: Site) -> str:
    return site.path.rpartition(".")[0] if site.port == "param_grad" else site.path


def _agreed(rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: row.error)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    return (
        f"a and b agree: rounding ({dtypes}) explains all differences; the largest relative error is"
        f" {worst.error:.2g} at {_named(worst)}"
    )


def _excess(one: ComparedTensor, swapped: bool) -> str:
    explained = one.explained / one.gap.scale if one.gap.scale else 0.0
    teachers, students = one.gap.values
    values = (students, teachers) if swapped else (teachers, students)
    least = one.explained + explained * abs(teachers)
    return f"{_off(one.gap.error, one.gap.worst, values, least)}; rounding explains {explained:.2g}"


def _off(error: float, worst: tuple[int, ...], values: tuple[float, float], least: float = 0.0) -> str:
    """How far two tensors are apart, and where most; not if the few entries of a sketch differ by `least` or less."""
    off = f"off by {error:.2g} relative to its size"
    if abs(values[0] - values[1]) <= least or values[0] == values[1] or all(map(math.isnan, values)):
        return off
    index = f" at ({', '.join(map(str, worst))})" if worst else ""
    return f"{off}, most{index}: {values[0]:.6g} in a, {values[1]:.6g} in b"
