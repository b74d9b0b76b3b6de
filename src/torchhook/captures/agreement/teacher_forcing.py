"""Run one model (the student) on the values of another (the teacher), so that rounding errors cannot accumulate.

Rounding errors grow from layer to layer, so even two equal models may end far apart. To find the error that each module
makes by itself, the student runs once more: the output of every matched module is compared with the teacher's and then
replaced by it. Every module, and the code between modules, works on the same numbers as in the teacher and differs by
its own error alone. The backward pass does the same with gradients.

With `noise`, the values passed on are off by about one rounding error. How far that moves a value downstream shows what
rounding alone can do there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.facts import KnownModules, ModuleFacts
from torchhook.captures.agreement.noise import nudged
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun, everywhere, in_order_of, run
from torchhook.captures.agreement.rounding import comparable, floor, precision
from torchhook.core.batch import Batch, Loss, fitted
from torchhook.core.edit import Edit
from torchhook.core.event import Event
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.core.trees import leaves, mapped, replaced

_TERMS = 256  # sums of more terms than this show their rounding
_EQUAL_TERMS = 32  # the same if all terms may be equal and so round the same way, like gradients behind a mean

Partners = Callable[[Location], "Location | None"]
"""From a location in the student to the matching one in the teacher."""

Observer = Callable[[Observation, "Observation | None", str, bool], None]
"""Receives what the student has at a location, what the teacher had there (None if there is nothing to compare with),
the path of the module whose forward is running, and whether the two locations are sure to match."""


class TeacherForcedRun:
    """One run of a student on the values of a teacher.

    Args:
        teacher: What flowed in the teacher.
        partners: Finds the teacher's location for one of the student's. Its values replace the student's.
        likely: The same for locations that only probably match. Those are compared, but nothing is replaced.
        observer: Called with what the student and the teacher have at each location.
        coarsest: The machine epsilon of the coarsest parameter. Noise in gradients is at least that large.
        noise: The seed of the noise; None for no noise.
        loudness: The size of the noise, in rounding errors.
    """

    def __init__(
        self,
        teacher: RecordedRun,
        partners: Partners,
        likely: Partners,
        observer: Observer,
        coarsest: float = 0.0,
        noise: int | None = None,
        loudness: float = 1.0,
    ) -> None:
        self.teacher = teacher
        self.partners = partners
        self.likely = likely
        self.observer = observer
        self.coarsest = coarsest
        self.noise = noise
        self.loudness = loudness
        self.known = KnownModules()
        self.running: list[tuple[str, ModuleFacts]] = []  # the calls in progress, outermost first
        self.output_sizes: dict[str, int] = {}  # elements that each module returned
        self.awaited: dict[Location, Observation] = {}  # outputs whose gradients have not been computed yet

    def run(self, student: nn.Module, batch: Batch, loss: Loss | None) -> None:
        """Run the student and report every location to the observer."""
        where = everywhere(student)
        taps = [Tap(where, self.enter, "input"), Tap(where, TeacherForcing(self, None))]
        gradients = run(student, self._noisy_batch(batch, student), loss, taps, eager=True)
        for location, output in self.awaited.items():  # gradients that autograd never computed are zero
            zeros = torch.zeros_like(output.tensors[location.leaf])
            self._report(Observation(location, output.module, [zeros]), _parent(location))
        for location, gradient in gradients.items():
            terms = self.output_sizes.get(_parent(location), 1) / (len(gradient) if gradient.dim() else 1)
            observed = Observation(location, self.known[student], [gradient], growth=terms / _EQUAL_TERMS)
            self._report(observed, _parent(location))

    def _report(self, observed: Observation, where: str) -> Observation | None:
        """Call the observer, and return what the teacher had if that replaces the student's value."""
        partner = self.partners(observed.location)
        sure = partner is not None
        partner = partner or self.likely(observed.location)
        known = None if partner is None else self.teacher.find(partner)
        if known is not None and observed.location.site.port == "input":
            observed = in_order_of(observed, known)
        self.observer(observed, known, where, sure)
        return known if sure else None

    def enter(self, event: Event) -> None:
        """A module is called: report its input."""
        value = (event.value, event.kwargs) if event.args and event.kwargs else event.value
        found = list(leaves(value))
        location, tensors = Location(event.site, event.call), [tensor for _, tensor in found]
        caller = self.running[-1][0] if self.running else ""
        addresses = [address for address, _ in found]
        self._report(Observation(location, self.known[event.module], tensors, addresses), caller)
        self.running.append((event.path, self.known[event.module]))

    def leave(self, location: Location, value: Any) -> Any:
        """A module has returned `value`: report it, and return what takes its place."""
        path, module = self.running.pop()
        tensors = [tensor for _, tensor in leaves(value)]
        self.output_sizes[path] = self.output_sizes.get(path, 0) + sum(tensor.numel() for tensor in tensors)
        observed = Observation(location, module, tensors, growth=math.sqrt(module.fan_in / _TERMS))
        partner = self._report(observed, path)
        if partner is None:
            return value
        count = comparable(partner.tensors, tensors)
        news = {number: self._teachers_value(observed, partner, number) for number in range(count)}
        return replaced(value, news)

    def _teachers_value(self, observed: Observation, partner: Observation, number: int) -> Tensor:
        """The teacher's tensor in the dtype and on the device of the student's, connected to its autograd graph."""
        old, new = observed.tensors[number], partner.tensors[number]
        if old.layout != new.layout:  # a recording has the values of a sparse tensor as a dense one
            return old
        value = self._noisy(torch.empty_like(old).copy_(new.reshape(old.shape)), [new])
        if not (old.requires_grad and torch.is_grad_enabled()):
            return value
        location = Location(Site(observed.location.site.path, "grad_output"), observed.location.call, number)
        self.awaited[location] = observed
        forced: Tensor = TeacherValue.apply(old, value, self, location, observed.module)  # type: ignore[no-untyped-call]  # torch's
        return forced

    def receive_gradient(self, location: Location, module: ModuleFacts, gradient: Tensor) -> Tensor:
        """A gradient was computed: report it, and return the one that flows on."""
        self.awaited.pop(location, None)
        partner = self._report(Observation(location, module, [gradient]), _parent(location))
        if partner is None or not comparable(partner.tensors, [gradient]):
            return gradient
        known = torch.empty_like(gradient).copy_(partner.tensors[0].reshape(gradient.shape))
        return self._noisy(known, partner.tensors, self.coarsest)

    def _noisy_batch(self, batch: Batch, student: nn.Module) -> Batch:
        given = self.teacher.observations.get(Location(Site("", "input"), 0))
        known = given.tensors if given else []
        arguments = mapped(lambda tensor: self._noisy(tensor, known), fitted(batch.arguments, student))
        return Batch(arguments, batch.target)

    def _noisy(self, value: Tensor, others: Sequence[Tensor], coarsest: float = 0.0) -> Tensor:
        """`value` moved up or down, at random, by the rounding error of the coarsest dtype of it and `others`."""
        if self.noise is None or not value.is_floating_point():
            return value
        self.noise += 1
        known = [value, *others]
        spacing = self.loudness * max(coarsest, precision(known))
        return nudged(value, self.noise, spacing, self.loudness * floor(known))


class TeacherForcing(Edit):
    """Replaces the output of a module by what a teacher-forced run returns for it."""

    whole = True
    by_call = True

    def __init__(self, forced: TeacherForcedRun, path: str | None) -> None:
        super().__init__()
        self.forced = forced
        self.path = path

    def bound(self, site: Site, module: nn.Module) -> TeacherForcing:
        return TeacherForcing(self.forced, site.path)

    def change(self, x: Any, call: int) -> Any:
        return self.forced.leave(Location(Site(self.path or ""), call), x)


class TeacherValue(torch.autograd.Function):
    """Replaces a value of the student by the teacher's, and in the backward its gradient."""

    @staticmethod
    def forward(
        ctx: Any, old: Tensor, value: Tensor, forced: TeacherForcedRun, location: Location, module: ModuleFacts
    ) -> Tensor:
        ctx.where = forced, location, module
        return value.clone()  # an argument itself must not be overwritten later

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        forced, location, module = ctx.where
        return forced.receive_gradient(location, module, gradient), None, None, None, None


def _parent(location: Location) -> str:
    return location.site.path.rpartition(".")[0]
