"""The same input twice gives the same result: no randomness is left on in eval mode, and no state is carried over."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchhook.captures.agreement.recorded_run import everywhere
from torchhook.core.batch import Batch, call, fitted
from torchhook.core.event import Event
from torchhook.core.tap import Tap
from torchhook.core.text import first_few
from torchhook.rules.contracts.case import Agreement, Case, Given, Variant, arguments_of
from torchhook.rules.contracts.contract import Note, contract


@contract(
    "TV101",
    "Pass training=self.training to functional dropout, and dropout_p=0 to attention in eval mode; keep no state"
    " between calls.",
)
def deterministic(case: Case) -> Iterator[Agreement | Note]:
    """The same input twice gives the same result in eval mode."""
    if case.left_on:
        yield Note(f"the model's own eval() leaves {places(case.left_on)} in train mode, and so it is checked")
    drawing = random_modules(case, case.plain)
    drawn = f"; random numbers are drawn in {places(drawing)}" if drawing else ""

    def after(given: Given) -> Variant:
        """The batch, after the model has seen another one."""

        def make() -> Batch:
            with torch.no_grad():
                call(case.model, Batch(fitted(arguments_of(given), case.model), None))
            return case.plain.make()

        return Variant(make, within=lambda: _seeded(2))

    reverse = case.taken(case.given, range(case.count)[::-1])
    for expected, actual, names in (
        (after(case.given), after(reverse), ("after the same batch", "after another one")),
        (case.variant(within=lambda: _seeded(1)), after(case.given), ("the first time", "the second time")),
    ):
        yield Agreement(
            expected,
            actual,
            f"the same input gives different results in eval mode{drawn}",
            names,
            what="the same input twice",
            raising="warning",
            evidence={"random": drawing} if drawing else None,
        )


def random_modules(case: Case, variant: Variant) -> list[str]:
    """The paths of the modules whose own code draws random numbers in a run."""
    drawing: dict[str, None] = {}
    running: list[tuple[str, list[Tensor]]] = []  # the calls in progress, with the generators when they were last seen

    def note() -> None:
        if running and not all(map(torch.equal, running[-1][1], _states())):
            drawing[running[-1][0]] = None

    def enter(event: Event) -> None:
        note()
        running.append((event.path, _states()))

    def leave(event: Event) -> None:
        note()
        running.pop()
        if running:
            running[-1] = (running[-1][0], _states())

    where = everywhere(case.model if variant.model is None else variant.model)
    case.output(variant, [Tap(where, enter, "input"), Tap(where, leave)])
    return list(drawing)


def places(paths: Sequence[str]) -> str:
    """The first few of some modules."""
    return first_few([path or "the model itself" for path in paths])


def _states() -> list[Tensor]:
    """The states of all random number generators: torch's, and a digest of those of Python and NumPy."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    numpy: Any = sys.modules.get("numpy")
    _, keys, position, *_ = numpy.random.get_state() if numpy else (None, b"", 0)
    others = hash(random.getstate()), hash((bytes(keys), position))
    return [torch.get_rng_state(), *devices, torch.tensor(others)]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Other random numbers; the case restores the generators."""
    torch.manual_seed(seed)
    yield
