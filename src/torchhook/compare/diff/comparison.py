"""Two models on one batch: run, matched, judged, and told."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from torchhook.captures.agreement.judge import Judge, Misfit, Seen
from torchhook.captures.agreement.pairs import matched, unmatched
from torchhook.captures.agreement.recorded_run import Moment, Place, Recording, ToNumber, is_compiled, record
from torchhook.captures.agreement.rounding import comparable, gap, precision
from torchhook.captures.agreement.teacher_forcing import Forced, See
from torchhook.compare.diff.names import Names, told
from torchhook.compare.diff.result import Difference, Row, place_of
from torchhook.core.batch import Batch
from torchhook.core.site import Site

_ROUTED = "{} hands on other shapes if its numbers are off by rounding alone: what comes of them was not judged"
_COMPILED = "{} is compiled: it was compiled anew, by the same backend with the same options, with taps inside"


class Comparison:
    """Two models, what flowed in each of them, and what belongs together."""

    def __init__(
        self, a: nn.Module, b: nn.Module, batch: Batch, loss: ToNumber | None, renamed: Mapping[str, str]
    ) -> None:
        self.models = a, b
        self.batch = batch
        self.loss = loss
        self.records = record(a, batch, loss), record(b, batch, loss)
        self.pairs = matched(*self.records, renamed)
        if not self.pairs.partners:
            raise ValueError("nothing of a and b can be compared: no call of a module has the same shape in both")
        self.notes = [
            _COMPILED.format(name) for name, model in zip("ab", self.models, strict=True) if is_compiled(model)
        ]

    def within(self, tolerance: float) -> Difference:
        """The first row whose error is above `tolerance`."""
        rows = [replace(row, parts=not row.error <= tolerance) for row in self.rows()]
        first = next((row for row in rows if row.parts), None)
        if first is None:
            return self._result(rows, None, None, f"they do not part: no relative error is above {tolerance:.2g}")
        where = f"they part at {_named(first)}"
        return self._result(rows, first.site, _owner(first.site), f"{where}: {_off(first)}, above {tolerance:.2g}")

    def judged(self) -> Difference:
        """The first place that is off by more than rounding, where both models have the same before it."""
        rows = list(self.rows())
        if not self.pairs.odd and all(row.error == 0 for row in rows):
            return self._result(rows, None, None, "they do not part: all values are equal")
        a, b = self.models
        swapped = is_compiled(b) and not is_compiled(a)  # values can be handed to a model only where it runs eagerly
        if is_compiled(a) and is_compiled(b):
            self.notes.append("both are compiled: the errors of their own are those of b uncompiled")
        teacher, student = (self.records[1], a) if swapped else (self.records[0], b)
        partners, likely = self.pairs.finder(from_a=swapped), self.pairs.finder(from_a=swapped, likely=True)
        coarsest = precision([*a.parameters(), *b.parameters()])

        def run(see: See, noise: int | None, loudness: float) -> None:
            Forced(teacher, partners, likely, see, coarsest, noise, loudness).run(student, self.batch, self.loss)

        judge = Judge(_backward(teacher), coarsest)
        judge.hear(run)
        names = Names(self.pairs, self.models, swapped)
        for path in judge.random:
            self.notes.append(f"{path!r} drops other numbers in each model, which says nothing: it was not judged")
        for path in judge.unjudged:
            self.notes.append(_ROUTED.format(names.of(names.module(path))))
        return self._told(rows, judge, names)

    def rows(self) -> Iterator[Row]:
        """A row for each pair of values, in execution order, gradients in that of the backward."""
        ours, theirs = self.records
        find = self.pairs.finder(from_a=True)
        order = _backward(ours)
        outputs = [moment.place for moment in ours.of("output")]
        for place in (*outputs, *sorted(order, key=order.__getitem__)):
            partner = find(place)
            mine, other = ours.find(place), theirs.find(partner) if partner else None
            if mine is not None and other is not None and (row := _row(mine, other)):
                yield row

    def _told(self, rows: list[Row], judge: Judge, names: Names) -> Difference:
        """The verdict, and the rows with what was seen of them."""
        own: dict[Place, list[Seen]] = {}
        for seen in judge.seen:
            own.setdefault(names.both(seen).a, []).append(seen)
        rows = [_with_own(row, own.get(Place(row.site, row.call, row.leaf), [])) for row in rows]
        found = judge.verdict()
        if found is None:
            return self._result(rows, None, None, _agreed(rows))
        off = f"not of the same shapes: {found.shapes}" if isinstance(found, Misfit) else _excess(found)
        module, sentence = told(names, self.records, found, judge.before(found), off)
        return self._result(rows, names.both(found).a.site, module, sentence)

    def _result(self, rows: list[Row], first: Site | None, module: str | None, verdict: str) -> Difference:
        lonely = unmatched(self.pairs, *self.models)
        return Difference(first, module, verdict, tuple(rows), tuple(lonely), tuple(self.notes))


def _row(mine: Moment, other: Moment) -> Row | None:
    """The row of two values: of their tensors, the pair that is farthest apart."""
    count = comparable(mine.tensors, other.tensors)
    gaps = [gap(mine.tensors[number], other.tensors[number]) for number in range(count)]
    if not gaps:
        return None
    number = max(range(count), key=lambda number: gaps[number].error)
    worst, place = gaps[number], mine.place
    dtypes = dict.fromkeys(
        str(tensor.dtype).removeprefix("torch.") for tensor in (mine.tensors[number], other.tensors[number])
    )
    kinds = dict.fromkeys(type(moment.module).__name__ for moment in (mine, other))
    return Row(
        site=place.site,
        call=place.call,
        partner=other.place.site.path,
        kind="" if place.site.port == "param_grad" else "/".join(kinds),
        error=worst.error,
        cosine=worst.cosine,
        worst=worst.worst,
        values=worst.values,
        dtype="/".join(dtypes),
        leaf=place.leaf,
    )


def _with_own(row: Row, seen: list[Seen]) -> Row:
    if not seen:
        return row
    worst = max(seen, key=lambda one: (one.parts, one.gap.error))
    explained = worst.explained / worst.gap.scale if worst.gap.scale else math.inf
    return replace(row, own=worst.gap.error, explained=explained, parts=worst.parts)


def _backward(recording: Recording) -> dict[Place, float]:
    """When the gradients of a run came: those of parameters after the last one of their module."""
    gradients = recording.of("grad_output")
    order = {moment.place: float(number) for number, moment in enumerate(gradients)}
    last = {moment.place.site.path: float(number) for number, moment in enumerate(gradients)}
    for moment in recording.of("param_grad"):
        owner = moment.place.site.path.rpartition(".")[0]
        order[moment.place] = last.get(owner, float(len(gradients))) + 0.5
    return order


def _named(row: Row) -> str:
    return f"{place_of(row.site, row.call)} ({row.kind})" if row.kind else place_of(row.site, row.call)


def _owner(site: Site) -> str:
    return site.path.rpartition(".")[0] if site.port == "param_grad" else site.path


def _agreed(rows: list[Row]) -> str:
    worst = max(rows, key=lambda row: row.error)
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
    return (
        f"they do not part: rounding ({dtypes}) explains all differences, the largest relative error being"
        f" {worst.error:.2g} at {_named(worst)}"
    )


def _off(row: Row) -> str:
    return _apart(row.error, row.worst, row.values)


def _excess(seen: Seen) -> str:
    explained = seen.explained / seen.gap.scale if seen.gap.scale else 0.0
    return f"{_apart(seen.gap.error, seen.gap.worst, seen.gap.values)}; rounding explains {explained:.2g}"


def _apart(error: float, worst: tuple[int, ...], values: tuple[float, float]) -> str:
    index = f" at ({', '.join(map(str, worst))})" if worst else ""
    return f"off by {error:.2g} relative to its size, most{index}: {values[0]:.6g} in a, {values[1]:.6g} in b"
