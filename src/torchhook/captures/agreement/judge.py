"""The verdict: the first place at which a student, run on the values of its teacher, is off by more than rounding.

At each place the difference is held against the spacing of the numbers there. Where it is more, the run is repeated
with what is handed on off by that spacing, at random: a place that rounding alone moves as far (a difference of large
numbers, a norm of small ones, a gradient that is zero but for rounding) is not at fault. Nor is one that has other
shapes then, as behind a router that chooses where the scores are close.

Places that only seem to belong together are evidence, not charges: when they are off and the next sure place agrees,
they were no pair; when that is off, too, the first of them says where it began.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.recorded_run import Moment, Place
from torchhook.captures.agreement.rounding import (
    TINY,
    Gap,
    apart,
    between,
    comparable,
    floor,
    gap,
    highest,
    is_leaf,
    left,
    precision,
    rms,
)
from torchhook.captures.agreement.teacher_forcing import See
from torchhook.core.site import Site
from torchhook.core.text import shape_of
from torchhook.core.torch_internals import DROPOUTS

_NARROW = 1e-4  # dtypes of larger spacings are summed in wider ones, others in themselves
_LOUD = 16.0  # of noise: what the code before a choice rounds as well, as the softmax of a router, has none of its own
_DRAWS = 8  # at most: what is close to a threshold, as of a ReLU, crosses it in some


Sizes = list[tuple[int, ...]]
"""The shapes of some tensors."""


class Slack(NamedTuple):
    """What rounding may do, in spacings: inside a module to the whole of its output and to one number, by noise."""

    whole: float
    one: float
    noise: float


_TIGHT = Slack(2.0, 8.0, 2.0)
_LOOSE = Slack(8.0, 32.0, 4.0)  # for what is summed in its own dtype


@dataclass(eq=False)
class Seen:
    """One tensor of the student's held against the teacher's, and how far noise moves it."""

    place: Place
    teachers: Place
    where: str  # the module, by path, whose forward was under way
    gap: Gap
    spacing: float
    floor: float
    growth: float
    tensors: tuple[Tensor, Tensor]  # the teacher's and the student's
    sure: bool = True  # whether the two belong together
    reach: Tensor | None = None  # how far noise has moved each number
    reshaped: bool = False  # whether noise has changed the shape
    excused: bool = False  # whether it comes of something that noise reshapes

    @property
    def explained(self) -> float:
        """The difference, as a whole, that rounding explains."""
        moved = 0.0 if self.reach is None else rms(self.reach)
        return self._rounded + self._slack.noise * moved

    @property
    def parts(self) -> bool:
        """Whether rounding does not explain the difference, neither as a whole nor number by number."""
        if self.excused:
            return False
        if self.reach is None:
            return self.gap.rms > self._rounded or self.gap.peak > self._rounded_one
        reach = self._slack.noise * self.reach
        rest, rest_one = left(*self.tensors, reach, self.gap.scale)
        one = self._rounded_one + highest(reach, self.tensors[0], self.gap.scale)
        return (self.gap.rms > self.explained and rest > self._rounded) or (
            self.gap.peak > one and rest_one > self._rounded_one
        )

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return "grad" in self.place.site.port

    @property
    def _rounded(self) -> float:
        return self._slack.whole * (self.spacing * self.gap.scale + self.floor)

    @property
    def _rounded_one(self) -> float:
        return self._slack.one * (self.spacing + self.floor / (self.gap.scale + TINY))

    @property
    def _slack(self) -> Slack:
        if self.spacing > _NARROW:
            return _LOOSE if self.place.site.port == "param_grad" else _TIGHT
        growth = max(1.0, self.growth)
        return Slack(_LOOSE.whole * growth, _LOOSE.one * growth, _LOOSE.noise * math.sqrt(growth))


@dataclass(eq=False)
class Misfit:
    """Tensors that cannot be compared, for there are others, or of other shapes."""

    place: Place
    teachers: Place
    where: str
    shapes: str
    before: int  # how many places were compared before
    sizes: tuple[Sizes, Sizes]  # the teacher's and the student's
    excused: bool = False

    @property
    def matters(self) -> bool:
        """Whether something else must come of it, unlike of an argument that is handed on in one model alone."""
        return self.place.site.port == "output" or len(self.sizes[0]) == len(self.sizes[1])


class Judge:
    """Looks on while a student is run, and says where it parts from its teacher.

    `order` says when the gradients of the teacher came, and `coarsest` is the spacing of the parameters that they came
    through: a gradient in float32 may be a product with weights in bfloat16.
    """

    def __init__(self, order: Mapping[Place, float], coarsest: float = 0.0) -> None:
        self.order = order
        self.coarsest = coarsest
        self.seen: list[Seen] = []
        self.doubts: dict[tuple[Place, int], Seen] = {}
        self.misfits: dict[Place, Misfit] = {}
        self.routers: dict[str, float] = {}  # by whose doing, by path, noise changes a size, and how far
        self.coming = 0.0  # the scale of the gradient before: what is computed from it may vanish but for rounding
        self.random: dict[str, None] = {}  # dropouts that draw numbers of their own, which nobody can compare

    def hear(self, run: Callable[[See, int | None, float], None]) -> None:
        """Run the student without noise and, if there is something in doubt, with some."""
        run(self._see, None, 1.0)
        for draw in range(_DRAWS):
            if self.verdict() is not None:
                run(self._see_moved, 1_000_000 * draw, 1.0)
        for draw in range(_DRAWS):
            if self.misfits and self.verdict() is not None:
                run(self._see_reshaped, 1_000_000 * draw, _LOUD)
                self._excuse()

    def verdict(self) -> Seen | Misfit | None:
        """Where they part first."""
        forward = [seen for seen in self.seen if not seen.backward]
        backward = [seen for seen in self.seen if seen.backward]
        backward.sort(key=lambda seen: self.order.get(seen.teachers, math.inf))
        first = next((seen for seen in (*forward, *backward) if seen.sure and seen.parts), None)
        misfits = [misfit for misfit in self.misfits.values() if not misfit.excused]
        if first is not None:
            return next((misfit for misfit in misfits if self._leads(misfit, first)), self._beginning(first))
        end = next((misfit for misfit in misfits if misfit.place.site == Site("")), None)
        return None if end is None else next(misfit for misfit in misfits if misfit.before == end.before)

    @property
    def unjudged(self) -> list[str]:
        """The modules, by path, that rounding alone makes hand on other shapes."""
        excused = dict.fromkeys(misfit.where for misfit in self.misfits.values() if misfit.excused)
        return [path for path in excused if not any(_is_under(path, other) for other in excused if other != path)]

    def before(self, found: Seen | Misfit) -> Seen | None:
        """The last place at which they agreed before they parted in the forward."""
        number = found.before if isinstance(found, Misfit) else self.seen.index(found)
        return next((seen for seen in reversed(self.seen[:number]) if not seen.parts), None)

    def _leads(self, misfit: Misfit, seen: Seen) -> bool:
        """Whether what does not fit is what comes to light at the place that was seen."""
        if misfit.matters and next((one for one in self.seen[misfit.before :] if one.sure), None) is seen:
            return True
        is_inside = misfit.place.site.port == "input" and _is_under(seen.place.site.path, misfit.place.site.path)
        return is_inside and self.seen.index(seen) >= misfit.before

    def _beginning(self, first: Seen) -> Seen:
        """The first place of those before `first` that seem to belong together and are off."""
        if first.backward:
            return first
        for seen in reversed(self.seen[: self.seen.index(first)]):
            if seen.sure or not seen.parts:
                break
            first = seen
        return first

    def _excuse(self) -> None:
        """Do not judge what comes of other shapes, where noise makes such as well; nor, with them, gradients."""
        for where, reach in self.routers.items():
            misfits = [misfit for misfit in self.misfits.values() if misfit.where == where]
            if any(_moved(*misfit.sizes) > reach for misfit in misfits):
                continue
            doubts = [doubt for doubt in self.doubts.values() if doubt.where == where and doubt.reshaped]
            start = min([misfit.before for misfit in misfits] + [self.seen.index(doubt) for doubt in doubts])
            for seen in self.seen[start:]:
                seen.excused |= seen.backward or _is_under(seen.place.site.path, where)
            for misfit in self.misfits.values():
                misfit.excused |= misfit.before >= start and _is_under(misfit.place.site.path, where)

    def _see(self, moment: Moment, known: Moment | None, where: str, sure: bool) -> None:
        """In the run without noise: compare."""
        if known is None:
            return
        port = moment.place.site.port
        count = comparable(known.tensors, moment.tensors)
        odd = count < max(len(known.tensors), len(moment.tensors))
        given = self.misfits.get(moment.place._replace(site=Site(moment.place.site.path, "input")))
        callers = given is not None and given.matters  # whose doing it is
        if sure and odd and (port == "input" or not (count or callers)):
            sizes = _sizes(known.tensors), _sizes(moment.tensors)
            shapes = f"{shape_of(known.tensors)} and {shape_of(moment.tensors)}"
            self.misfits[moment.place] = Misfit(moment.place, known.place, where, shapes, len(self.seen), sizes)
        modules = (moment.module, known.module) if port == "output" else ()
        for number in range(count):
            pair = known.tensors[number], moment.tensors[number]
            spacing = precision(pair, *modules)
            if port != "output" or not is_leaf(moment.module):
                spacing = max(spacing, between(pair))
            if "grad" in port:
                spacing = max(spacing, self.coarsest)
            least = floor(pair) + spacing * self.coming
            seen = Seen(moment.place, known.place, where, gap(*pair), spacing, least, moment.growth, pair, sure)
            if seen.parts and _are_random(modules):
                self.random[moment.place.site.path] = None
                continue
            if seen.parts:
                seen.tensors = pair[0], pair[1].detach().clone()
                self.doubts[moment.place, number] = seen
            self.seen.append(seen)
            self.coming = seen.gap.scale if port == "grad_output" else 0.0

    def _see_moved(self, moment: Moment, known: Moment | None, where: str, sure: bool) -> None:
        """In a run with noise: how far does it move what is in doubt?"""
        for number, tensor in enumerate(moment.tensors):
            doubt = self.doubts.get((moment.place, number))
            if doubt is not None and tensor.shape == doubt.tensors[1].shape:
                moved = apart(doubt.tensors[1], tensor.detach())
                doubt.reach = moved if doubt.reach is None else torch.maximum(doubt.reach, moved)

    def _see_reshaped(self, moment: Moment, known: Moment | None, where: str, sure: bool) -> None:
        """In a run with loud noise: does it change the shape of what is in doubt?"""
        misfit = self.misfits.get(moment.place)
        moved = _moved(misfit.sizes[1], _sizes(moment.tensors)) if misfit else 0.0
        if moved:
            self.routers[where] = max(moved, self.routers.get(where, 0.0))
        for number, tensor in enumerate(moment.tensors):
            doubt = self.doubts.get((moment.place, number))
            if doubt is not None and doubt.place.site.port == "input":
                doubt.reshaped |= tensor.shape != doubt.tensors[1].shape


def _sizes(tensors: list[Tensor]) -> Sizes:
    return [() if tensor.is_nested else tuple(tensor.shape) for tensor in tensors]


def _moved(a: Sizes, b: Sizes) -> float:
    """The largest difference of two sizes; infinite if there are more, or of other dimensions."""
    if [len(shape) for shape in a] != [len(shape) for shape in b]:
        return math.inf
    return max((abs(m - n) for x, y in zip(a, b, strict=True) for m, n in zip(x, y, strict=True)), default=0)


def _is_under(path: str, above: str) -> bool:
    return not above or path == above or path.startswith(f"{above}.")


def _are_random(modules: tuple[nn.Module, ...]) -> bool:
    """Whether these are dropouts that both drop the same share."""
    shares = [module.p for module in modules if isinstance(module, DROPOUTS) and module.training]
    return len(shares) == 2 and shares[0] == shares[1]
