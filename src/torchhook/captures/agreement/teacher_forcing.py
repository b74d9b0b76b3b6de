"""A second run in which errors do not add up: each module is handed what the other model had there.

Rounding grows from layer to layer, so what two equal models give at the end of a deep one may be far apart. To tell
whose doing it is, the second model (the student) is run once more, and whatever a matched module returns is compared
with what the first model (the teacher) had there, and then replaced by it: every module, and all code between, works
on the same numbers as in the teacher, and differs by its own error alone. In the backward the same is done with the
gradients. With `noise`, what is handed on is off by the spacing of its dtype: how much that matters at a place is what
rounding may do there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.recorded_run import Moment, Place, Recording, ToNumber, everywhere, run
from torchhook.captures.agreement.rounding import comparable, floor, precision
from torchhook.core.batch import Batch, fitted
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.core.trees import leaves, mapped, replaced

_TERMS = 256  # from so many on, rounding of a sum shows
_EQUAL_TERMS = 32  # the same where all may be equal, and so rounded the same way, as gradients behind a mean

Partners = Callable[[Place], "Place | None"]
"""The place of the teacher's that belongs to one of the student's."""

See = Callable[[Moment, "Moment | None", str, bool], None]
"""Told of what the student has at a place, what the teacher had there (None: nothing to compare with), in whose
forward, by path, it happens, and whether the two places surely belong together."""


class Forced:
    """One run of a student on the values of a teacher.

    At places that have but `likely` partners nothing is handed on. Gradients are noisy by `coarsest`, the spacing of
    the parameters they may have come through, if that is more than their own. Noise is of `loudness` spacings.
    """

    def __init__(
        self,
        teacher: Recording,
        partners: Partners,
        likely: Partners,
        see: See,
        coarsest: float = 0.0,
        noise: int | None = None,
        loudness: float = 1.0,
    ) -> None:
        self.teacher = teacher
        self.partners = partners
        self.likely = likely
        self.see = see
        self.coarsest = coarsest
        self.noise = noise
        self.loudness = loudness
        self.open: list[tuple[str, nn.Module]] = []  # the calls under way, from the outside
        self.sizes: dict[str, int] = {}  # of what each module returned
        self.awaited: dict[Place, Moment] = {}  # outputs whose gradients have not come yet

    def run(self, student: nn.Module, batch: Batch, loss: ToNumber | None) -> None:
        """Run the student, and compare."""
        where = everywhere(student)
        taps = [Tap(where, self.begin, "input"), Tap(where, Forcing(self, None))]
        gradients = run(student, self._noisy_batch(batch, student), loss, taps, eager=True)
        for place, output in self.awaited.items():  # what should have come and did not is zero
            self._tell(Moment(place, output.module, [torch.zeros_like(output.tensors[place.leaf])]), _above(place))
        for place, gradient in gradients.items():
            terms = self.sizes.get(_above(place), 1) / (len(gradient) if gradient.dim() else 1)
            self._tell(Moment(place, student, [gradient], growth=terms / _EQUAL_TERMS), _above(place))

    def _tell(self, moment: Moment, where: str) -> Moment | None:
        """Show what there is at a place; what the teacher had, if that is to go on."""
        partner = self.partners(moment.place)
        sure = partner is not None
        partner = partner or self.likely(moment.place)
        known = None if partner is None else self.teacher.find(partner)
        self.see(moment, known, where, sure)
        return known if sure else None

    def begin(self, event: Event) -> None:
        """A module is called."""
        value = (event.value, event.kwargs) if event.args and event.kwargs else event.value
        tensors = [tensor for _, tensor in leaves(value)]
        self._tell(Moment(Place(event.site, event.call), event.module, tensors), self.open[-1][0] if self.open else "")
        self.open.append((event.path, event.module))

    def end(self, place: Place, value: Any) -> Any:
        """It has returned; what goes on in the place of that."""
        path, module = self.open.pop()
        tensors = [tensor for _, tensor in leaves(value)]
        self.sizes[path] = self.sizes.get(path, 0) + sum(tensor.numel() for tensor in tensors)
        moment = Moment(place, module, tensors, growth=math.sqrt(_fan_in(module) / _TERMS))
        partner = self._tell(moment, path)
        if partner is None:
            return value
        count = comparable(partner.tensors, tensors)
        news = {number: self._handed(moment, partner, number) for number in range(count)}
        return replaced(value, news)

    def _handed(self, moment: Moment, partner: Moment, number: int) -> Tensor:
        old, new = moment.tensors[number], partner.tensors[number]
        value = self._noisy(torch.empty_like(old).copy_(new), [new])
        if not (old.requires_grad and torch.is_grad_enabled()):
            return value
        place = Place(Site(moment.place.site.path, "grad_output"), moment.place.call, number)
        self.awaited[place] = moment
        handed: Tensor = Handed.apply(old, value, self, place, moment.module)  # type: ignore[no-untyped-call]  # torch's
        return handed

    def gradient(self, place: Place, module: nn.Module, gradient: Tensor) -> Tensor:
        """A gradient has come; the one that goes on."""
        self.awaited.pop(place, None)
        partner = self._tell(Moment(place, module, [gradient]), _above(place))
        if partner is None or not comparable(partner.tensors, [gradient]):
            return gradient
        return self._noisy(torch.empty_like(gradient).copy_(partner.tensors[0]), partner.tensors, self.coarsest)

    def _noisy_batch(self, batch: Batch, student: nn.Module) -> Batch:
        given = self.teacher.moments.get(Place(Site("", "input"), 0))
        known = given.tensors if given else []
        arguments = mapped(lambda tensor: self._noisy(tensor, known), fitted(batch.arguments, student))
        return Batch(arguments, batch.target)

    def _noisy(self, value: Tensor, others: list[Tensor], coarsest: float = 0.0) -> Tensor:
        """`value` off by the spacing of its own numbers or of those of `others`, up or down at random."""
        if self.noise is None or not value.is_floating_point():
            return value
        self.noise += 1
        generator = torch.Generator(value.device).manual_seed(self.noise)
        signs = torch.randint(0, 2, value.shape, generator=generator, device=value.device) * 2 - 1
        spacing = max(coarsest, precision([value, *others]))
        size = value.double().abs() * spacing + floor([value, *others])
        return (value.double() + self.loudness * size * signs).to(value.dtype)


class Forcing(Edit):
    """Hands what a module returns to a run, which says what goes on."""

    whole = True
    by_call = True

    def __init__(self, forced: Forced, path: str | None) -> None:
        super().__init__()
        self.forced = forced
        self.path = path

    def bound(self, site: Site, module: nn.Module) -> Forcing:
        return Forcing(self.forced, site.path)

    def change(self, x: Any, call: int) -> Any:
        return self.forced.end(Place(Site(self.path or ""), call), x)


class Handed(torch.autograd.Function):
    """The value of the teacher in the place of the student's, and so for its gradient."""

    @staticmethod
    def forward(ctx: Any, old: Tensor, value: Tensor, forced: Forced, place: Place, module: nn.Module) -> Tensor:
        ctx.told = forced, place, module
        return value.clone()  # an argument itself must not be overwritten later

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        forced, place, module = ctx.told
        return forced.gradient(place, module, gradient), None, None, None, None


def _fan_in(module: nn.Module) -> float:
    """How many products are in a sum of a module with weights, about."""
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.dim() > 1 and len(parameter)]
    return max((weight.numel() / len(weight) for weight in weights), default=1.0)


def _above(place: Place) -> str:
    return place.site.path.rpartition(".")[0]
