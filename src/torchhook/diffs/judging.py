"""The verdict: the first place at which a student, run on the values of its teacher, is off by more than rounding.

At each place the difference is held against the spacing of the numbers there. Where it is more, the run is repeated
with what is handed on off by that spacing, at random: a place that rounding alone moves as far (a difference of large
numbers, a norm of small ones, a gradient that is zero but for rounding) is not at fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from torchhook.core.site import Site
from torchhook.diffs.forcing import See
from torchhook.diffs.numbers import TINY, Gap, apart, between, comparable, floor, gap, highest, left, precision, rms
from torchhook.diffs.running import Moment, Place
from torchhook.text import shape_of

_NARROW = 1e-4  # dtypes of larger spacings are summed in wider ones, others in themselves
_DRAWS = 8  # at most: what is close to a threshold, as of a ReLU, crosses it in some


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
    reach: Tensor | None = None  # how far noise has moved each number

    @property
    def explained(self) -> float:
        """The difference, as a whole, that rounding explains."""
        moved = 0.0 if self.reach is None else rms(self.reach)
        return self._rounded + self._slack.noise * moved

    @property
    def parts(self) -> bool:
        """Whether rounding does not explain the difference, neither as a whole nor number by number."""
        if self.reach is None:
            return self.gap.rms > self._rounded or self.gap.peak > self._rounded_one
        reach = self._slack.noise * self.reach
        rest, rest_one = left(*self.tensors, reach, self.gap.scale)
        one = self._rounded_one + highest(reach, self.tensors[0], self.gap.scale)
        return (self.gap.rms > self.explained and rest > self._rounded) or (
            self.gap.peak > one and rest_one > self._rounded_one
        )

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


@dataclass(frozen=True)
class Misfit:
    """Tensors that cannot be compared, for there are others, or of other shapes."""

    place: Place
    where: str
    shapes: str
    before: int  # how many places were compared before


class Judge:
    """Looks on while a student is run, and says where it parts from its teacher."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.doubts: dict[tuple[Place, int], Seen] = {}
        self.misfits: list[Misfit] = []
        self.coming = 0.0  # the scale of the gradient before: what is computed from it may vanish but for rounding
        self.random: dict[str, None] = {}  # dropouts that draw numbers of their own, which nobody can compare

    def hear(self, run: Callable[[See, int | None], None]) -> None:
        """Run the student without noise and, if there is something in doubt, with some."""
        run(self._see, None)
        for draw in range(_DRAWS):
            if any(doubt.parts for doubt in self.doubts.values()):
                run(self._see_moved, 1_000_000 * draw)

    def verdict(self, order: Mapping[Place, float]) -> Seen | Misfit | None:
        """Where they part first. `order` says when the gradients of the teacher came."""
        forward = [seen for seen in self.seen if "grad" not in seen.place.site.port]
        backward = [seen for seen in self.seen if "grad" in seen.place.site.port]
        backward.sort(key=lambda seen: order.get(seen.teachers, math.inf))
        first = next((seen for seen in (*forward, *backward) if seen.parts), None)
        if first is not None:
            return next((misfit for misfit in self.misfits if self._leads(misfit, first)), first)
        end = next((misfit for misfit in self.misfits if misfit.place.site == Site("")), None)
        return None if end is None else next(misfit for misfit in self.misfits if misfit.before == end.before)

    def _leads(self, misfit: Misfit, seen: Seen) -> bool:
        """Whether what does not fit is what comes to light at the place that was seen."""
        path = misfit.place.site.path
        if misfit.place.site.port == "output":
            return misfit.before < len(self.seen) and self.seen[misfit.before] is seen
        inside = not path or seen.place.site.path == path or seen.place.site.path.startswith(f"{path}.")
        return inside and self.seen.index(seen) >= misfit.before

    def _see(self, moment: Moment, known: Moment | None, where: str) -> None:
        """In the run without noise: compare."""
        if known is None:
            return
        port = moment.place.site.port
        count = comparable(known.tensors, moment.tensors)
        odd = count < max(len(known.tensors), len(moment.tensors))
        if odd and (port == "input" or not count):
            shapes = f"{shape_of(known.tensors)} and {shape_of(moment.tensors)}"
            self.misfits.append(Misfit(moment.place, where, shapes, len(self.seen)))
        modules = (moment.module, known.module) if port == "output" else ()
        for number in range(count):
            pair = known.tensors[number], moment.tensors[number]
            spacing = precision(pair, *modules)
            if port != "output" or moment.module._modules:
                spacing = max(spacing, between(pair))
            least = floor(pair) + spacing * self.coming
            seen = Seen(moment.place, known.place, where, gap(*pair), spacing, least, moment.growth, pair)
            if seen.parts and _are_random(modules):
                self.random[moment.place.site.path] = None
                continue
            if seen.parts:
                seen.tensors = pair[0], pair[1].detach().clone()
                self.doubts[moment.place, number] = seen
            self.seen.append(seen)
            self.coming = seen.gap.scale if port == "grad_output" else 0.0

    def _see_moved(self, moment: Moment, known: Moment | None, where: str) -> None:
        """In a run with noise: how far does it move what is in doubt?"""
        for number, tensor in enumerate(moment.tensors):
            doubt = self.doubts.get((moment.place, number))
            if doubt is not None and tensor.shape == doubt.tensors[1].shape:
                moved = apart(doubt.tensors[1], tensor.detach())
                doubt.reach = moved if doubt.reach is None else torch.maximum(doubt.reach, moved)


def _are_random(modules: tuple[nn.Module, ...]) -> bool:
    """Whether these are dropouts that both drop the same share."""
    shares = [module.p for module in modules if isinstance(module, _DropoutNd) and module.training]
    return len(shares) == 2 and shares[0] == shares[1]
