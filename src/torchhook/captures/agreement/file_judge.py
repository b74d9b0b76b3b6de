"""The verdict on two recorded runs, of which neither model is here to be run again.

What a value was computed from is recorded, too: for the output of a layer its input and its parameters, for anything
else what its caller had by then. If those differ already, by rounding or an earlier mistake, a difference of about that
size was carried here. How much a value moves when what it was computed from moves by a rounding error may have been
measured when it was recorded. A layer that is suspect is computed again, if a known formula fits it. What follows from
choices that came out otherwise by rounding, such as the experts of a token, is not judged inside the module that makes
them, and what that module returns may differ by as much as so many choices explain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from torchhook.captures.agreement.choices import ChoicesOf, Routed
from torchhook.captures.agreement.evidence import ComparedTensor
from torchhook.captures.agreement.formulas import Layer, formula_of
from torchhook.captures.agreement.judge import RoundingJudge
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun, in_order_of
from torchhook.captures.agreement.rounding import Absent, gap, precision
from torchhook.captures.agreement.teacher_forcing import Partners
from torchhook.core.site import Site

_TIGHT = 2.0  # times the error of what a value was computed from: below that, it is not suspect
_MEASURED, _GUESSED = 4.0, 8.0  # times that error are carried on, if the effect of rounding was measured or not
_BACKWARD = 16.0  # the same for gradients
_TERMS = 256  # sums of more terms than this show their rounding
_PARAMETER = 2.0  # rounding errors by which a parameter may differ


class Seen(NamedTuple):
    """A value in a run, the path of the module whose forward was running, and where what it was computed from is.

    `sources` are groups: what is nearest, then what is further away, in case nothing of the nearest was compared.
    """

    observed: Observation
    where: str
    sources: Sequence[Sequence[Location]]


class FileJudge(RoundingJudge):
    """Compares two recorded runs and finds where the student diverges from its teacher.

    Args:
        partners: Finds the teacher's location for one of the student's.
        likely: The same for locations that only probably match.
        trusting: Whether parameters may differ, since what made them differ was judged already, in an earlier step.
    """

    def __init__(
        self,
        teacher: RecordedRun,
        student: RecordedRun,
        partners: Partners,
        likely: Partners,
        trusting: bool = False,
    ) -> None:
        super().__init__(teacher.gradient_order(), max(teacher.coarsest, student.coarsest))
        self.teacher, self.student = teacher, student
        self.partners, self.likely = partners, likely
        self.trusting = trusting
        self.errors: dict[Location, float] = {}  # of the student's values
        self.choices = ChoicesOf()
        self._sources: Sequence[Sequence[Location]] = ()

    def compare(self) -> None:
        """Compare all values that both have."""
        for observed, where, sources in seen(self.student):
            self._sources = sources
            partner = self.partners(observed.location)
            sure = partner is not None
            partner = partner or self.likely(observed.location)
            known = None if partner is None else self.teacher.find(partner)
            if known is not None and observed.location.site.port == "input":
                observed = in_order_of(observed, known)
            if known is None and "grad" not in observed.location.site.port:  # a block that the other one does not have
                self.errors[observed.location] = self._carried()
            growth = math.sqrt(observed.module.terms / _TERMS)
            if known is not None and "grad" not in observed.location.site.port:
                self.choices.see(where, known, observed, len(self.compared), self._carried())
            self._compare(replace(observed, growth=growth), known, where, sure)
        for routed in self.choices.by_rounding():
            self._excuse_choices(routed)

    def _excuse_choices(self, routed: Routed) -> None:
        """Excuse what follows from choices inside a module, unless they change the shape of what it returns."""
        returned = Site(routed.where)
        if any(location.site == returned for location in self.mismatches):
            return
        self._excuse(routed.where, routed.start)
        for one in self.compared[routed.start :]:
            if one.location.site == returned:
                one.excused, one.carried = False, one.carried + routed.error * one.gap.scale

    def _compared(
        self, observed: Observation, known: Observation, number: int, where: str, sure: bool
    ) -> ComparedTensor:
        one = super()._compared(observed, known, number, where, sure)
        carried = self._carried()
        if self.trusting:
            carried = max(carried, *self._parameter_errors(observed, known, least=0.0).values(), 0.0)
        judged = self._judged(one, observed, known, number, carried)
        if sure or not judged.diverges:  # what may not be a match at all explains nothing that follows
            self.errors[observed.location] = max(self.errors.get(observed.location, 0.0), one.gap.error)
        return judged

    def _carried(self) -> float:
        """The largest error of what the value was computed from, as far as it was compared."""
        groups = ([self.errors[source] for source in group if source in self.errors] for group in self._sources)
        return max(next(filter(None, groups), [0.0]))

    def _judged(
        self, one: ComparedTensor, observed: Observation, known: Observation, number: int, carried: float
    ) -> ComparedTensor:
        """The tensor with what was carried to it from others, of which the largest relative error is `carried`."""
        if one.is_gradient:
            return replace(one, carried=_BACKWARD * carried * one.gap.scale)
        tight = replace(one, carried=_TIGHT * carried * one.gap.scale)
        if not tight.diverges:
            return tight
        if not self.trusting and (predicted := self._predicted(observed, known)) is not None:
            theirs = observed.tensors[number]
            return replace(one, gap=gap(predicted, theirs), tensors=(predicted, theirs))
        if not self.trusting and self._parameter_errors(observed, known):
            return tight
        return replace(one, carried=self._factor(observed, known, number) * carried * one.gap.scale)

    def _suspect(self, one: ComparedTensor, number: int) -> None:
        """There are no runs with noise that could clear it, but it may follow from choices made by rounding."""
        if not one.is_gradient:
            caller = self.student.observations.get(self._sources[0][0]) if self._sources else None
            self.choices.differs(one, caller.tensors if caller else (), len(self.compared), self._carried())

    def _factor(self, observed: Observation, known: Observation, number: int) -> float:
        """How many times the error of what a value was computed from is carried on to it."""
        gains = [
            side.moved[number] / max(precision([side.tensors[number]]), 1e-30)
            for side in (observed, known)
            if number < len(side.moved)
        ]
        return _MEASURED * max([1.0, *gains]) if gains else _GUESSED

    def _predicted(self, observed: Observation, known: Observation) -> Tensor | None:
        """What the teacher's layer would have returned for the student's input."""
        inputs = [self._input(run, side.location) for run, side in ((self.teacher, known), (self.student, observed))]
        if observed.location.site.port != "output" or not known.module.is_leaf or None in inputs:
            return None
        mine, theirs = (one.tensors for one in inputs if one is not None)
        if len(mine) != 1 or len(theirs) != 1 or len(known.tensors) != 1 or isinstance(theirs[0], Absent):
            return None
        if mine[0].is_floating_point() != theirs[0].is_floating_point():  # such as ids and what was looked up
            return None
        formula = formula_of(Layer(known.module, mine[0], known.tensors[0], self._parameters(self.teacher, known)))
        try:
            predicted = None if formula is None else formula(theirs[0])
        except (RuntimeError, IndexError):  # the student's input is of another size, or has other ids
            return None
        return predicted if predicted is not None and predicted.shape == observed.tensors[0].shape else None

    def _parameter_errors(
        self, observed: Observation, known: Observation, least: float = _PARAMETER
    ) -> dict[str, float]:
        """By how much the parameters of a layer differ, those that differ by more than so many rounding errors."""
        if observed.location.site.port != "output" or not (observed.module.is_leaf and known.module.is_leaf):
            return {}
        mine, theirs = self._parameters(self.teacher, known), self._parameters(self.student, observed)
        alike = [name for name in mine if name in theirs and mine[name].shape == theirs[name].shape]
        errors = {name: gap(mine[name], theirs[name]).error for name in alike}
        rounding = {name: precision([mine[name], theirs[name]]) for name in alike}
        return {name: error for name, error in errors.items() if error > least * rounding[name]}

    def _input(self, run: RecordedRun, location: Location) -> Observation | None:
        return run.observations.get(Location(Site(location.site.path, "input"), location.call))

    def _parameters(self, run: RecordedRun, observed: Observation) -> dict[str, Tensor]:
        """The parameters and buffers that a layer has itself."""
        prefix = f"{observed.location.site.path}." if observed.location.site.path else ""
        names = [name for name in run.parameters if name.startswith(prefix) and "." not in name[len(prefix) :]]
        found = {name[len(prefix) :]: run.parameters.get(name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}  # shards may not fit together


@dataclass
class _Frame:
    """A call in progress: where its input is, and where what it can compute with is."""

    path: str
    known: list[Location] = field(default_factory=list)


def seen(run: RecordedRun) -> Iterator[Seen]:
    """The values of a run in order, each with what it was computed from."""
    frames: list[_Frame] = []
    gradients: list[Location] = []
    for location, observed in run.observations.items():
        path, port = location.site
        if port == "input":
            yield Seen(observed, frames[-1].path if frames else "", _known(frames))
            frames.append(_Frame(path, [location]))
        elif port == "output":
            while frames and frames[-1].path != path:
                frames.pop()  # calls that raised an exception which the model caught
            yield Seen(observed, path, _known(frames))
            frames = frames[:-1]
            for outer in frames[-1:]:
                outer.known.append(location)
        else:
            yield Seen(observed, path.rpartition(".")[0], [[*gradients, *_forward_of(location)]])
            gradients.append(location)


def _known(frames: Sequence[_Frame]) -> list[list[Location]]:
    """What the calls in progress can compute with, innermost first."""
    return [list(frame.known) for frame in reversed(frames)]


def _forward_of(location: Location) -> Sequence[Location]:
    """What a gradient depends on besides other gradients: the input and the output of its module."""
    path = location.site.path
    path = path.rpartition(".")[0] if location.site.port == "param_grad" else path
    return [Location(Site(path, "input"), location.call), Location(Site(path), location.call)]
