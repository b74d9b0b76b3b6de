"""The entry point: two runs of models on one batch, and whether they agree up to rounding.

`PairedRuns` matches their calls; ``judged().first`` is None if they agree, and otherwise the first tensor or shape that
rounding does not explain. If one of the models is here, it is the student, which runs once more on the values of the
other, its teacher; else what was recorded has to do. `Judgement.in_both` turns their locations into those of a and b.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import nn

from torchhook.captures.agreement.evidence import ComparedTensor, ShapeMismatch
from torchhook.captures.agreement.file_judge import FileJudge
from torchhook.captures.agreement.judge import RoundingJudge
from torchhook.captures.agreement.pairs import matched
from torchhook.captures.agreement.recorded_run import Location, RecordedRun, is_compiled, record
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


class Side(NamedTuple):
    """What flowed in a model, and the model, if it is here to be run again."""

    run: RecordedRun
    model: nn.Module | None = None

    @staticmethod
    def of(model: nn.Module, batch: Batch, loss: Loss | None = None) -> Side:
        """A model that is run once."""
        return Side(record(model, batch, loss), model)


class PairedRuns:
    """Two runs on the same batch, with their calls matched.

    Models run as they are (train or eval mode), and their buffers and the random number generators are restored.

    Args:
        batch: What both were run on, to run one of them again.
        loss: Also compare gradients, backward from this loss of output and target.
        renamed: Paths of modules in a, and what they are called in b.
        trusting: Whether recorded parameters may differ, since what made them differ was judged already.

    >>> import torch
    >>> x = Batch.of(torch.arange(8.0).reshape(2, 4))
    >>> a, b = (Side.of(nn.LayerNorm(4, eps=eps), x) for eps in (1e-5, 1e-2))
    >>> print(PairedRuns(a, a, x).judged().first)
    None
    >>> PairedRuns(a, b, x).judged().first.location.site
    Site(path='', port='output')
    """

    def __init__(
        self,
        a: Side,
        b: Side,
        batch: Batch,
        loss: Loss | None = None,
        renamed: Mapping[str, str] = MappingProxyType({}),
        trusting: bool = False,
    ) -> None:
        self.sides = a, b
        self.trusting = trusting
        self.batch = batch
        self.loss = loss
        self.records = a.run, b.run
        self.pairs = matched(*self.records, renamed)
        if not self.pairs.partners:
            raise ValueError("cannot compare a and b: no module call has an output of the same shape in both")

    def judged(self) -> Judgement:
        """Run one of the models on the values of the other, and judge where rounding does not explain a difference."""
        swapped = student_of(*self.sides)
        if swapped is None:
            return self._judged_as_recorded()
        teacher, (_, student) = (self.records[1], self.sides[0]) if swapped else (self.records[0], self.sides[1])
        assert student is not None
        partners, likely = self.pairs.finder(from_a=swapped), self.pairs.finder(from_a=swapped, likely=True)
        coarsest = max(record.coarsest for record in self.records)

        def run(observer: Observer, noise: int | None, loudness: float) -> None:
            forced = TeacherForcedRun(teacher, partners, likely, observer, coarsest, noise, loudness)
            forced.run(student, self.batch, self.loss)

        judge = RoundingJudge(teacher.gradient_order(), coarsest)
        judge.examine(run)
        return Judgement(judge, swapped)

    def _judged_as_recorded(self) -> Judgement:
        partners, likely = self.pairs.finder(from_a=False), self.pairs.finder(from_a=False, likely=True)
        judge = FileJudge(*self.records, partners, likely, self.trusting)
        judge.compare()
        return Judgement(judge, swapped=False)


def student_of(a: Side, b: Side) -> bool | None:
    """Whether a is the student, which has to run uncompiled on real values; None if neither can be."""
    able = [
        one.model is not None and not other.run.is_sketched and not (is_compiled(one.model) and other.model is None)
        for one, other in ((a, b), (b, a))
    ]
    if not any(able):
        return None
    prefers_a = a.model is not None and b.model is not None and is_compiled(b.model) and not is_compiled(a.model)
    return prefers_a or not able[1]
