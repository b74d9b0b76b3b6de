"""Compares what the optimizers did in one step: how the parameters of two recordings changed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchhook.captures.agreement.pairs import renaming
from torchhook.captures.agreement.recorded_run import RecordedRun
from torchhook.captures.agreement.rounding import gap, precision
from torchhook.compare.diff.fused import real_module
from torchhook.compare.diff.result import Difference, Row
from torchhook.compare.diff.sides import Sides, orient
from torchhook.compare.recordings.sketch import Sketch
from torchhook.core.site import Site

_SLACK = 8.0  # rounding errors of the parameters that are no difference
_SIGNS = 4.0  # an optimizer that looks at signs turns an error e of a gradient into about √e: some signs flip
_NEAR = 0.1  # the relative error of an entry of a gradient from which on what an optimizer makes of it is not judged

Change = tuple[Any, Any]
"""A parameter before and after a step."""


def diff_updates(before: Sides, after: Sides, gradients: Sides, found: Difference) -> Difference:
    """`found`, or where the parameters after the step diverge although the gradients did not.

    The sides have the parameters of both models before and after the step, or their `gradients`, in the same terms.
    `found` says which modules belong together.
    """
    names = {row.site.path: row.partner for row in reversed(found.rows) if row.site.port == "output"}
    names = {**before.renamed, **names}
    for sides in (before, after, gradients):
        orient(sides.a.run, sides.b.run, names)
    mine, theirs = (_changes(*runs) for runs in zip(_runs(before), _runs(after), strict=True))
    partners = {name: _partner(name, names) for name in mine}
    pairs = {
        name: other for name, other in partners.items() if other in theirs and _fit(mine[name][0], theirs[other][0])
    }
    known = gradients.a.run.parameters, gradients.b.run.parameters
    rows = [
        _row(name, other, mine[name], theirs[other], (known[0].get(name), known[1].get(other)))
        for name, other in pairs.items()
    ]
    if not (known[0] and known[1]):
        rows = _without_gradients(rows)
    lonely = [
        *_changed("a", before.a.run, mine, set(pairs)),
        *_changed("b", before.b.run, theirs, set(pairs.values())),
    ]
    found = replace(found, rows=(*found.rows, *rows), notes=(*found.notes, *_note(lonely)))
    first = next((row for row in rows if row.parts), None)
    if first is None:
        return found
    owner = first.site.path.rpartition(".")[0]
    verdict = (
        f"the update diverges at the parameter {first.site.path}: its change is off by {first.error:.2g} relative to"
        f" its size; rounding and gradients explain {first.explained:.2g}"
    )
    return replace(found, first=first.site, module=real_module(before.a.run, owner, None), verdict=verdict)


def _runs(sides: Sides) -> tuple[RecordedRun, RecordedRun]:
    return sides.a.run, sides.b.run


def _changes(before: RecordedRun, after: RecordedRun) -> dict[str, Change]:
    """The parameters before and after a step; those of which the parts of several ranks do not fit are left out."""
    pairs = {name: (before.parameters.get(name), after.parameters.get(name)) for name in before.parameters}
    return {name: (old, new) for name, (old, new) in pairs.items() if old is not None and new is not None}


def _partner(name: str, renamed: Mapping[str, str]) -> str:
    owner, _, own = name.rpartition(".")
    return ".".join(filter(None, (renaming(owner, renamed), own)))


def _fit(mine: Any, theirs: Any) -> bool:
    return bool(mine.shape == theirs.shape)


def _changed(which: str, run: RecordedRun, changes: Mapping[str, Change], compared: Collection[str]) -> Iterator[str]:
    """The parameters that a step has changed and that were not compared, as a whole or in parts."""
    for name, (before, after) in changes.items():
        owner, _, own = name.rpartition(".")
        parts = [f"{path}.{own}" for path, real in run.stand_ins.items() if real == (owner,)]
        covered = name in compared or (parts and all(part in compared for part in parts))
        is_part = owner in run.stand_ins
        if not covered and not is_part and _is_any(_minus(after, before)):
            yield f"{name} of {which}"


def _note(lonely: Sequence[str]) -> Iterator[str]:
    if lonely:
        several = f" and {len(lonely) - 1} more parameters" if len(lonely) > 1 else ""
        yield f"the update of {lonely[0]}{several} was not compared: the other side has none of that name and shape"


def _row(name: str, other: str, mine: Change, theirs: Change, gradients: tuple[Any, Any]) -> Row:
    """The row of two updates, by gradients that were perhaps recorded."""
    (before, after), (start, end) = mine, theirs
    changes, gradient = [_minus(after, before), _minus(end, start)], 0.0
    if all(one is not None and one.shape == before.shape for one in gradients):
        gradient = gap(*gradients).error
        if not any(isinstance(one, Sketch) for one in (*gradients, *changes)):
            changes = [change * _is_sure(*gradients) for change in changes]
    apart, epsilon = gap(changes[0], changes[1]), precision([before, start])
    size = gap(before, before).scale / apart.scale if apart.scale else math.inf
    explained = _SLACK * (epsilon + gap(before, start).error) * size + _SIGNS * math.sqrt(max(gradient, epsilon))
    return Row(
        Site(name, "param"),
        0,
        other,
        "",
        apart.error,
        apart.cosine,
        apart.worst,
        apart.values,
        str(before.dtype).removeprefix("torch."),
        own=apart.error,
        explained=explained,
        parts=bool(apart.error > explained),
    )


def _is_sure(mine: Tensor, theirs: Tensor) -> Tensor:
    """Where gradients are more than rounding, of which an optimizer that divides by their size makes anything."""
    return (theirs.double().reshape(mine.shape) - mine.double()).abs() <= _NEAR * mine.double().abs()


def _without_gradients(rows: Sequence[Row]) -> list[Row]:
    """The rows, none of which diverges unless most do: some gradients may be rounding errors."""
    few = 2 * sum(row.parts for row in rows) <= len(rows)
    return [replace(row, parts=False) for row in rows] if few else list(rows)


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, Sketch):
        return Sketch(after.shape, after.dtype, after.dim_of_features, after.sums - before.sums, *after.blank())
    return after.double() - before.double()


def _is_any(change: Any) -> bool:
    return bool((change.sums if isinstance(change, Sketch) else change).any())
