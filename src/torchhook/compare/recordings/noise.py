"""How far rounding errors move each value of a recorded run: the model runs again on its own values, with noise."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchhook.captures.agreement.recorded_run import Location, Observation
from torchhook.captures.agreement.rounding import comparable, gap
from torchhook.captures.agreement.teacher_forcing import TeacherForcedRun
from torchhook.compare.recordings.files import Moved
from torchhook.compare.recordings.recording import RecordedRank
from torchhook.core.batch import Batch

_DRAWS = 2


def moved_by_rounding(model: nn.Module, rank: RecordedRank, batch: Batch) -> Iterator[Moved]:
    """How far noise of one rounding error, in all that a value is computed from, moves it: the most of two draws."""
    moved: dict[Location, list[float]] = {}
    run = rank.run(rank.first)

    def observe(observed: Observation, known: Observation | None, where: str, sure: bool) -> None:
        if known is None:
            return
        count = comparable(known.tensors, observed.tensors)
        errors = [gap(known.tensors[number], observed.tensors[number]).error for number in range(count)]
        before = moved.setdefault(observed.location, [0.0] * count)
        moved[observed.location] = [max(pair) for pair in zip(before, errors, strict=False)]

    for draw in range(_DRAWS):
        TeacherForcedRun(run, _itself, _itself, observe, noise=1_000_000 * draw).run(model, batch, None)
    for location, by in moved.items():
        yield Moved(location.site.port, location.site.path, location.call, tuple(by))


def _itself(location: Location) -> Location:
    return location
