"""Compares what the optimizers did in one step: how the parameters of two recordings changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torchhook.captures.agreement.pairs import renaming
from torchhook.captures.agreement.rounding import gap, precision
from torchhook.compare.diff.result import Difference, Row
from torchhook.compare.recordings.recording import RecordedRank
from torchhook.compare.recordings.sketch import Sketch
from torchhook.core.site import Site

_SLACK = 8.0  # rounding errors of the parameters that are no difference
_SIGNS = 4.0  # an optimizer that looks at signs turns an error e of a gradient into about √e: some signs flip


def diff_updates(
    a: Sequence[RecordedRank], b: Sequence[RecordedRank], step_a: int, step_b: int, found: Difference
) -> Difference:
    """`found`, or where the parameters after the step diverge although the gradients did not."""
    if len(a) > 1 or len(b) > 1:  # their parts are compared by what they do in the next step
        return found
    names = {mine: theirs for pair in found.match for mine, theirs in zip(pair.a, pair.b, strict=False)}
    rows = list(_rows(_change(a[0], step_a), _change(b[0], step_b), _gradient_errors(found), names))
    first = next((row for row in rows if row.parts), None)
    if first is None:
        return replace(found, rows=(*found.rows, *rows))
    owner = first.site.path.rpartition(".")[0]
    verdict = (
        f"the update diverges at the parameter {first.site.path}: its change is off by {first.error:.2g} relative to"
        f" its size; rounding and gradients explain {first.explained:.2g}"
    )
    return replace(found, first=first.site, module=owner, verdict=verdict, rows=(*found.rows, *rows))


def _change(rank: RecordedRank, step: int) -> dict[str, tuple[Any, Any]]:
    """The parameters that were recorded before and after a step."""
    before, after = rank.parameters_at(step), rank.parameters_at(step + 1)
    return {name: (before[name], after[name]) for name in before if name in after}


def _rows(
    mine: Mapping[str, tuple[Any, Any]],
    theirs: Mapping[str, tuple[Any, Any]],
    gradients: Mapping[str, float],
    renamed: Mapping[str, str],
) -> Iterator[Row]:
    for name, (before, after) in mine.items():
        owner, _, own = name.rpartition(".")
        other = ".".join(filter(None, (renaming(owner, renamed), own)))
        if other not in theirs or tuple(theirs[other][0].shape) != tuple(before.shape):
            continue
        change, partner = _minus(after, before), _minus(theirs[other][1], theirs[other][0])
        apart = gap(change, partner)
        epsilon = precision([before, theirs[other][0]])
        size = gap(before, before).scale / apart.scale if apart.scale else math.inf
        start = gap(before, theirs[other][0]).error
        explained = _SLACK * (epsilon + start) * size + _SIGNS * math.sqrt(gradients.get(name, 0.0))
        yield Row(
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


def _gradient_errors(found: Difference) -> dict[str, float]:
    return {row.site.path: row.error for row in found.rows if row.site.port == "param_grad"}


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, Sketch):
        return Sketch(after.shape, after.dtype, after.dim_of_features, after.sums - before.sums, *after.blank())
    return after.double() - before.double()
