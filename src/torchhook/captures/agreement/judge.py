"""The verdict: the first location where a student, run on its teacher's values, is off by more than rounding.

1. The student runs on the teacher's values. Every tensor whose difference exceeds the machine epsilon is a suspect.
2. While suspects remain, the run repeats with random noise of one rounding error in the values passed on. A suspect
   that noise moves as far is cleared: a difference of large numbers, a norm of small ones, a gradient that is zero but
   for rounding. Two runs are enough if most of each suspect that is left is off by far more than noise moves any of it.
3. If shapes differ, the run repeats with louder noise. What changes shape then, like the tokens behind a router that
   picks between close scores, is not judged.

Locations that only probably match (`sure=False`) are evidence and never a verdict by themselves. If they diverge and
the next sure location agrees, they were not a match after all; if that diverges as well, it began at the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torchhook.captures.agreement.evidence import ComparedTensor, ShapeMismatch, in_words, size_change
from torchhook.captures.agreement.facts import ModuleFacts
from torchhook.captures.agreement.recorded_run import Location, Observation
from torchhook.captures.agreement.rounding import comparable, floor, gap, matmul_precision, precision, shapes_of
from torchhook.captures.agreement.teacher_forcing import Observer
from torchhook.core.site import Site

_LOUD = 16.0  # rounding errors of noise: the code before a choice, like the softmax of a router, rounds without noise
_DRAWS = 8  # at most: a value close to a threshold, like that of a ReLU, crosses it only in some draws
_AT_LEAST = 2


class RoundingJudge:
    """Watches teacher-forced runs of a student and finds where it diverges from its teacher.

    Args:
        order: When each gradient of the teacher was computed.
        coarsest: The machine epsilon of the coarsest parameter: a float32 gradient may come from bfloat16 weights.
    """

    def __init__(self, order: Mapping[Location, float], coarsest: float = 0.0) -> None:
        self.order = order
        self.coarsest = coarsest
        self.compared: list[ComparedTensor] = []
        self.suspects: dict[tuple[Location, int], ComparedTensor] = {}
        self.mismatches: dict[Location, ShapeMismatch] = {}
        self.routers: dict[str, float] = {}  # modules, by path, in which noise changes a size, and by how much
        self.routed: dict[str, None] = {}  # modules, by path, in which rounding chooses what is computed
        self.incoming = 0.0  # the scale of the gradient just before: what depends on it may cancel down to rounding
        self.random: dict[str, None] = {}  # dropouts that drew different random numbers and cannot be compared

    def examine(self, run: Callable[[Observer, int | None, float], None]) -> None:
        """Run the student without noise and then, while anything is in doubt, with noise.

        `run` takes an observer, the seed of the noise (None for none), and its size in rounding errors.
        """
        run(self._compare, None, 1.0)
        for draw in range(_DRAWS):
            if self.verdict() is None or (draw >= _AT_LEAST and self._is_certain()):
                break
            run(self._measure_noise, 1_000_000 * draw, 1.0)
        for draw in range(_DRAWS):
            if self.mismatches and self.verdict() is not None:
                run(self._measure_reshaping, 1_000_000 * draw, _LOUD)
                self._excuse_routed()

    def _is_certain(self) -> bool:
        """Whether more noise can change nothing: every difference that it has not explained is far beyond it."""
        return not self.mismatches and all(one.is_beyond_doubt for one in self.suspects.values() if one.diverges)

    def verdict(self) -> ComparedTensor | ShapeMismatch | None:
        """Where the student first diverges; None if it agrees with the teacher up to rounding."""
        forward = [one for one in self.compared if not one.is_gradient]
        backward = [one for one in self.compared if one.is_gradient]
        backward.sort(key=lambda one: self.order.get(one.teachers, math.inf))
        first = next((one for one in (*forward, *backward) if one.sure and one.diverges), None)
        mismatches = [mismatch for mismatch in self.mismatches.values() if not mismatch.excused]
        if first is not None:
            return next((one for one in mismatches if self._causes(one, first)), self._beginning(first))
        end = next((mismatch for mismatch in mismatches if mismatch.location.site == Site("")), None)
        return None if end is None else next(mismatch for mismatch in mismatches if mismatch.before == end.before)

    @property
    def unjudged(self) -> list[str]:
        """The paths of modules that were not judged because rounding alone changes the shapes of their values."""
        return [
            path for path in self.routed if not any(_is_under(path, other) for other in self.routed if other != path)
        ]

    def last_agreement(self, found: ComparedTensor | ShapeMismatch) -> ComparedTensor | None:
        """The last tensor in the forward pass that agreed before `found`."""
        number = found.before if isinstance(found, ShapeMismatch) else self.compared.index(found)
        return next((one for one in reversed(self.compared[:number]) if not one.diverges), None)

    def _causes(self, mismatch: ShapeMismatch, first: ComparedTensor) -> bool:
        """Whether the mismatch is what makes the `first` diverging tensor diverge."""
        if mismatch.has_effect and next((one for one in self.compared[mismatch.before :] if one.sure), None) is first:
            return True
        path = mismatch.location.site.path
        matters = mismatch.location.site.port == "input" and (mismatch.has_effect or mismatch.same_kind)
        is_inside = matters and _is_under(first.location.site.path, path)
        return is_inside and self.compared.index(first) >= mismatch.before

    def _beginning(self, first: ComparedTensor) -> ComparedTensor:
        """The earliest of the probable matches right before `first` that all diverge."""
        if first.is_gradient:
            return first
        for one in reversed(self.compared[: self.compared.index(first)]):
            if one.sure or not one.diverges:
                break
            first = one
        return first

    def _excuse_routed(self) -> None:
        """Excuse everything that depends on shapes which noise changes as much, and then also all gradients."""
        for where, reach in self.routers.items():
            mismatches = [mismatch for mismatch in self.mismatches.values() if mismatch.where == where]
            if any(size_change(*mismatch.shapes) > reach for mismatch in mismatches):
                continue
            suspects = [suspect for suspect in self.suspects.values() if suspect.where == where and suspect.reshaped]
            start = min([one.before for one in mismatches] + [self.compared.index(suspect) for suspect in suspects])
            self._excuse(where, start)

    def _excuse(self, where: str, start: int) -> None:
        """Excuse what was compared in a module from a number on, and all gradients."""
        self.routed[where] = None
        for one in self.compared[start:]:
            one.excused |= one.is_gradient or _is_under(one.location.site.path, where)
        for mismatch in self.mismatches.values():
            mismatch.excused |= mismatch.before >= start and _is_under(mismatch.location.site.path, where)

    def _compare(self, observed: Observation, known: Observation | None, where: str, sure: bool) -> None:
        """In the run without noise: compare the student's tensors with the teacher's."""
        if known is None:
            return
        count = comparable(known.tensors, observed.tensors)
        port = observed.location.site.port
        if sure and count < max(len(known.tensors), len(observed.tensors)):
            self._note_mismatch(observed, known, where, count)
        same_kind = known.module.kind == observed.module.kind
        if port == "input" and len(known.tensors) != len(observed.tensors) and not same_kind:
            return  # what one of them adds up inside, the other may have added up before
        modules = (observed.module, known.module) if port == "output" else ()
        for number in range(count):
            one = self._compared(observed, known, number, where, sure)
            if one.diverges and _are_dropouts(modules):
                self.random[observed.location.site.path] = None
                continue
            if one.diverges:
                self._suspect(one, number)
            self.compared.append(one)
            self.incoming = one.gap.scale if port == "grad_output" else 0.0

    def _compared(
        self, observed: Observation, known: Observation, number: int, where: str, sure: bool
    ) -> ComparedTensor:
        """One tensor of the student next to the teacher's."""
        pair, port = (known.tensors[number], observed.tensors[number]), observed.location.site.port
        epsilon = precision(pair)
        if port == "output":
            epsilon = max(epsilon, observed.module.epsilon, known.module.epsilon)
        if port != "output" or not observed.module.is_leaf:
            epsilon = max(epsilon, matmul_precision(pair))
        if "grad" in port:
            epsilon = max(epsilon, self.coarsest)
        least = floor(pair) + epsilon * self.incoming
        return ComparedTensor(
            observed.location, known.location, where, gap(*pair), epsilon, least, observed.growth, pair, sure
        )

    def _suspect(self, one: ComparedTensor, number: int) -> None:
        """Keep a tensor that diverges, to see how far noise moves it."""
        one.tensors = one.tensors[0], one.tensors[1].detach().clone()
        self.suspects[one.location, number] = one

    def _note_mismatch(self, observed: Observation, known: Observation, where: str, count: int) -> None:
        """Note that only `count` tensors can be compared, unless the cause is a mismatch in the module's input."""
        location = observed.location
        given = self.mismatches.get(location._replace(site=Site(location.site.path, "input")))
        is_callers = given is not None and given.has_effect
        if location.site.port == "input" or not (count or is_callers):
            shapes = shapes_of(known.tensors), shapes_of(observed.tensors)
            text = f"{in_words(shapes[0])} and {in_words(shapes[1])}"
            same_kind = known.module.kind == observed.module.kind
            self.mismatches[location] = ShapeMismatch(
                location, known.location, where, text, len(self.compared), shapes, same_kind
            )

    def _measure_noise(self, observed: Observation, known: Observation | None, where: str, sure: bool) -> None:
        """In a run with noise: measure how far it moves the suspects."""
        for number, tensor in enumerate(observed.tensors):
            suspect = self.suspects.get((observed.location, number))
            if suspect is not None and tensor.shape == suspect.tensors[1].shape:
                suspect.note_moved(tensor)

    def _measure_reshaping(self, observed: Observation, known: Observation | None, where: str, sure: bool) -> None:
        """In a run with loud noise: note where it changes shapes."""
        mismatch = self.mismatches.get(observed.location)
        change = size_change(mismatch.shapes[1], shapes_of(observed.tensors)) if mismatch else 0.0
        if change:
            self.routers[where] = max(change, self.routers.get(where, 0.0))
        for number, tensor in enumerate(observed.tensors):
            suspect = self.suspects.get((observed.location, number))
            if suspect is not None and suspect.location.site.port == "input":
                suspect.reshaped |= tensor.shape != suspect.tensors[1].shape


def _is_under(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(f"{above}.")


def _are_dropouts(modules: tuple[ModuleFacts, ...]) -> bool:
    """Whether both modules are dropouts with the same probability."""
    probabilities = [module.numbers.get("p") for module in modules if module.is_dropout and module.training]
    return len(probabilities) == 2 and probabilities[0] == probabilities[1]
