"""Says which other module of b would fit one of a that diverges: two of them may have been exchanged."""

from __future__ import annotations

from collections.abc import Iterator

from torchhook.captures.agreement.evidence import ComparedTensor
from torchhook.captures.agreement.paired_runs import Judgement, PairedRuns
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun
from torchhook.captures.agreement.rounding import comparable, gap

_BETTER = 0.1  # times the error: then another module fits


def better_fits(runs: PairedRuns, judgement: Judgement, found: ComparedTensor) -> Iterator[str]:
    """A note for the module of b whose output is nearly that of a's module which diverges, if there is one."""
    both = judgement.in_both(found)
    mine, theirs = runs.records[0].observations.get(both.a), runs.records[1].observations.get(both.b)
    if both.a.site.port != "output" or mine is None or theirs is None or not mine.module.is_leaf:
        return
    limit = _BETTER * gap(mine.tensors[0], theirs.tensors[0]).error
    for location, other in _siblings(runs.records[1], both.b):
        if comparable(mine.tensors, other.tensors) and gap(mine.tensors[0], other.tensors[0]).error < limit:
            path = both.a.site.path
            yield f"{location.site.path} in b fits {path} better than {both.b.site.path}: they may be exchanged"
            return


def _siblings(run: RecordedRun, location: Location) -> Iterator[tuple[Location, Observation]]:
    """The outputs of the other modules of the same kind that the same module calls."""
    parent, own = location.site.path.rpartition(".")[0], run.observations[location].module
    for at, observed in run.observations.items():
        is_other = at.site.port == "output" and at != location and at.site.path.rpartition(".")[0] == parent
        if is_other and (observed.module.kind, observed.module.parameters) == (own.kind, own.parameters):
            yield at, observed
