"""The same input twice gives the same result: no randomness is left on in eval mode, and no state is carried over."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchhook.captures.agreement.recorded_run import everywhere
from torchhook.core.batch import Batch, call, fitted
from torchhook.core.event import Event
from torchhook.core.tap import Tap
from torchhook.rules.contracts.case import Agreement, Case, Variant, arguments_of
from torchhook.rules.contracts.contract import contract


@contract(
    "TV101",
    "Pass training=self.training to functional dropout, and dropout_p=0 to attention in eval mode; keep no state"
    " between calls.",
)
def deterministic(case: Case) -> Iterator[Agreement]:
    """The same input twice gives the same result in eval mode."""
    drawing = random_modules(case, case.plain)

    def after_another() -> Batch:
        """The batch, after the model has seen another one."""
        other = arguments_of(case.taken(case.given, range(case.count)[::-1]))
        with torch.no_grad():
            call(case.model, Batch(fitted(other, case.model), None))
        return case.plain.make()

    drawn = f"; random numbers are drawn in {_listed(drawing)}" if drawing else ""
    yield Agreement(
        case.variant(within=lambda: _seeded(1)),
        Variant(after_another, within=lambda: _seeded(2)),
        f"the same input gives different results in eval mode{drawn}",
        ("the first time", "the second time"),
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


def _listed(paths: list[str]) -> str:
    shown = ", ".join(path or "the model itself" for path in paths[:3])
    return f"{shown} and {len(paths) - 3} more" if len(paths) > 3 else shown
