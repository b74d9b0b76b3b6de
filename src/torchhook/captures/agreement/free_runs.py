"""Two runs of one model that should agree, compared place by place while each runs by itself.

The runs need not have the same inputs: a `Pairing` says which part of a tensor in one run should equal which part of
that in the other, such as the real tokens of a padded sequence. What differs is a suspect until runs with noise of the
size of rounding errors show how far rounding alone moves it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchhook.captures.agreement.evidence import ComparedTensor
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun
from torchhook.captures.agreement.rounding import floor, gap, matmul_precision, precision
from torchhook.core.site import Site
from torchhook.core.trees import Address

_DRAWS = 4  # runs with noise, at most
_TERMS = 256  # sums of more terms than this show their rounding

Views = Sequence[tuple[Tensor, Tensor]]
"""Parts of two tensors that should be equal. If there are several, one of them has to be."""

Pairing = Callable[[Tensor, Tensor, "Tensor | None"], Views]
"""From a tensor of each run, and that of a reference run, to the parts that should be equal; none if it cannot tell."""


@dataclass(eq=False)
class Disagreement:
    """Where two runs first disagree: the location, the tensor in its value, and the path of the module at fault."""

    location: Location
    address: Address
    module: str
    compared: list[ComparedTensor]  # one per view

    @property
    def worst(self) -> ComparedTensor:
        """The view that is closest to agreeing."""
        return min(self.compared, key=lambda one: one.gap.error)

    @property
    def persists(self) -> bool:
        """Whether rounding explains none of the views."""
        return all(one.diverges for one in self.compared)


class FreeRuns:
    """Two recorded runs of a model that should agree.

    Args:
        pairing: Which parts of their tensors should be equal.
        noisy: Repeats the first run with noise from a seed.
        reference: A run with other sizes, which shows the pairing what the dimensions of a tensor are.
        epsilon: The machine epsilon of what a run computed with, if it is coarser than its dtypes.
        ignored: Names of items in values that are not compared.
    """

    def __init__(
        self,
        expected: RecordedRun,
        actual: RecordedRun,
        pairing: Pairing,
        noisy: Callable[[int], RecordedRun],
        reference: RecordedRun | None = None,
        epsilon: float = 0.0,
        ignored: frozenset[str] = frozenset(),
    ) -> None:
        self.expected, self.actual = expected, actual
        self.pairing = pairing
        self.noisy = noisy
        self.reference = reference
        self.epsilon = epsilon
        self.ignored = ignored
        self.judged: set[Location] = set()  # where something could be compared

    def first(self) -> Disagreement | None:
        """The first place, in order of execution, where rounding does not explain the difference."""
        suspects = list(self._suspects())
        for seed in range(_DRAWS):
            if not suspects:
                break
            self._measure(suspects, self.noisy(seed))
            suspects = [suspect for suspect in suspects if suspect.persists]
        agreed = self.judged - {suspect.location for suspect in suspects}
        suspects = [one for one in suspects if not agreed.intersection(_around(one.location))]
        order = self.expected.gradient_order()  # empty without a backward
        return min(suspects, key=lambda one: order.get(one.location, -1.0), default=None)

    def _suspects(self) -> Iterator[Disagreement]:
        for observed, caller in _with_callers(self.expected):
            other = self.actual.observations.get(observed.location)
            if other is None:
                continue
            for address, tensor in _judged(observed):
                if self.ignored.intersection(map(str, address)):
                    continue
                compared = self._compared(observed, other, address, tensor)
                suspect = Disagreement(observed.location, address, _at_fault(observed.location.site, caller), compared)
                self.judged.update([observed.location] if compared else [])
                if compared and suspect.persists:
                    yield suspect

    def _compared(
        self, observed: Observation, other: Observation, address: Address, tensor: Tensor
    ) -> list[ComparedTensor]:
        theirs = _at(other, address)
        if theirs is None:
            return []
        views = self.pairing(tensor, theirs, self._referred(observed.location, address))
        return [self._pair(observed, mine, part) for mine, part in views if bool(mine.isfinite().any())]

    def _pair(self, observed: Observation, mine: Tensor, part: Tensor) -> ComparedTensor:
        """Two parts compared; the noise will be measured in the first run, so its part comes second."""
        location, module = observed.location, observed.module
        is_output = location.site.port == "output"
        epsilon = max(self.epsilon, precision([mine, part]), module.epsilon if is_output else 0.0)
        if not (is_output and module.is_leaf):
            epsilon = max(epsilon, matmul_precision([mine, part]))
        growth = math.sqrt(module.terms / _TERMS)
        return ComparedTensor(
            location, location, "", gap(mine, part), epsilon, floor([mine, part]), growth, (part, mine)
        )

    def _measure(self, suspects: list[Disagreement], run: RecordedRun) -> None:
        """Measure how far noise has moved the suspects."""
        for suspect in suspects:
            observed, other = run.observations.get(suspect.location), self.actual.observations[suspect.location]
            moved = None if observed is None else _at(observed, suspect.address)
            theirs = _at(other, suspect.address)
            if moved is None or theirs is None:
                continue
            views = self.pairing(moved, theirs, self._referred(suspect.location, suspect.address))
            for one, (mine, _) in zip(suspect.compared, views, strict=False):
                if mine.shape == one.tensors[1].shape:
                    one.note_moved(mine)

    def _referred(self, location: Location, address: Address) -> Tensor | None:
        observed = None if self.reference is None else self.reference.observations.get(location)
        return None if observed is None else _at(observed, address)


def _at_fault(site: Site, caller: str) -> str:
    """The path of the module that has made what flows at a site."""
    if site.port == "param_grad":
        return site.path.rpartition(".")[0]
    return caller if site.port == "input" else site.path


def _around(location: Location) -> Iterator[Location]:
    """The outputs of the modules around a location: if one of them agrees, what differs inside is of no effect."""
    path = location.site.path if location.site.port in ("input", "output") else ""
    while path:
        path = path.rpartition(".")[0]
        yield Location(Site(path), location.call)


def _with_callers(run: RecordedRun) -> Iterator[tuple[Observation, str]]:
    """What flowed, in order, each with the path of the module whose forward was running."""
    running: list[str] = []
    for location, observed in run.observations.items():
        path, port = location.site
        if port == "output" and path in running:
            while running.pop() != path:
                pass  # calls that raised an exception which the model caught
        yield observed, running[-1] if running else ""
        if port == "input":
            running.append(path)


def _judged(observed: Observation) -> Iterator[tuple[Address, Tensor]]:
    """The tensors that are compared: not the arguments of the model itself, nor masks, which may differ on purpose."""
    site = observed.location.site
    if site.port == "input" and not site.path:
        return
    for address, tensor in zip(observed.addresses or [()], observed.tensors, strict=False):
        is_mask = site.port == "input" and (not tensor.is_floating_point() or "mask" in str(address))
        if tensor.dim() and not is_mask and not tensor.is_nested:
            yield address, tensor


def _at(observed: Observation, address: Address) -> Tensor | None:
    addresses = observed.addresses or [()]
    return observed.tensors[addresses.index(address)] if address in addresses else None
