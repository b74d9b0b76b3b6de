"""The entry point: run two models on one batch and judge whether they agree up to rounding.

`PairedRuns` runs both models and matches their calls; ``judged().first`` is None if they agree, and otherwise the first
tensor or shape that rounding does not explain. One model is the teacher, the other the student that runs once more on
its values; `Judgement.in_both` turns their locations into those of a and b.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from torchhook.captures.agreement.evidence import ComparedTensor, ShapeMismatch
from torchhook.captures.agreement.judge import RoundingJudge
from torchhook.captures.agreement.pairs import matched
from torchhook.captures.agreement.recorded_run import Location, is_compiled, record
from torchhook.captures.agreement.teacher_forcing import Observer, TeacherForcedRun
from torchhook.core.batch import Batch, Loss


class Both(NamedTuple):
    """A location in model a and the matching one in model b."""

    a: Location
    b: Location


class Judgement(NamedTuple):
    """The judge after all runs, and whether a was the student (`swapped`) or, as usual, b."""

    judge: RoundingJudge
    swapped: bool

    @property
    def first(self) -> ComparedTensor | ShapeMismatch | None:
        """Where the models first diverge; None if they agree up to rounding."""
        return self.judge.verdict()

    def in_both(self, found: ComparedTensor | ShapeMismatch) -> Both:
        """The location of a finding in a and in b."""
        return Both(found.location, found.teachers) if self.swapped else Both(found.teachers, found.location)


class PairedRuns:
    """Two models, each run once on the same batch, with their calls matched.

    Both run as they are (train or eval mode), and their buffers and the random number generators are restored.

    Args:
        loss: Also compare gradients, backward from this loss of output and target.
        renamed: Paths of modules in a, and what they are called in b.

    >>> import torch
    >>> a, b = nn.LayerNorm(4), nn.LayerNorm(4, eps=1e-2)
    >>> x = Batch.of(torch.arange(8.0).reshape(2, 4))
    >>> print(PairedRuns(a, a, x).judged().first)
    None
    >>> PairedRuns(a, b, x).judged().first.location.site
    Site(path='', port='output')
    """

    def __init__(
        self,
        a: nn.Module,
        b: nn.Module,
        batch: Batch,
        loss: Loss | None = None,
        renamed: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.models = a, b
        self.batch = batch
        self.loss = loss
        self.records = record(a, batch, loss), record(b, batch, loss)
        self.pairs = matched(*self.records, renamed)
        if not self.pairs.partners:
            raise ValueError("cannot compare a and b: no module call has an output of the same shape in both")

    def judged(self) -> Judgement:
        """Run one of the models on the values of the other, and judge where rounding does not explain a difference."""
        a, b = self.models
        swapped = is_compiled(b) and not is_compiled(a)  # the student must run uncompiled
        teacher, student = (self.records[1], a) if swapped else (self.records[0], b)
        partners, likely = self.pairs.finder(from_a=swapped), self.pairs.finder(from_a=swapped, likely=True)
        coarsest = max(record.coarsest for record in self.records)

        def run(observer: Observer, noise: int | None, loudness: float) -> None:
            forced = TeacherForcedRun(teacher, partners, likely, observer, coarsest, noise, loudness)
            forced.run(student, self.batch, self.loss)

        judge = RoundingJudge(teacher.gradient_order(), coarsest)
        judge.examine(run)
        return Judgement(judge, swapped)
