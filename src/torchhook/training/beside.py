"""What the other ranks of a training have written: the norms of their parameters. No rank calls another for this."""

from __future__ import annotations

import math
import time
from pathlib import Path

from torchhook.core.errors import RunError
from torchhook.training.runs.folders import ranks
from torchhook.training.runs.run import Run

_PATIENCE = 2.0  # seconds that all ranks together have to finish their runs
_PAUSE = 0.05

Norms = dict[str, dict[int, float]]  # by parameter and step


def norms_of_ranks(folder: Path) -> dict[int, Norms]:
    """The norms of the parameters of every other rank of the run in `folder`, as far as they are there in time."""
    until = time.monotonic() + _PATIENCE
    return {int(below.name.removeprefix("rank")): _norms(below, until) for below in ranks(folder)}


def _norms(folder: Path, until: float) -> Norms:
    try:
        with Run(folder) as run:
            while run.state == "running" and time.monotonic() < until:
                time.sleep(_PAUSE)
            steps, paths, values = run.series("mean", "param_norm")
    except RunError:  # it is gone, or was never finished
        return {}
    table = zip(paths, values.tolist(), strict=True)
    return {path: _known(steps, row) for path, row in table}


def _known(steps: list[int], row: list[float]) -> dict[int, float]:
    return {step: value for step, value in zip(steps, row, strict=True) if not math.isnan(value)}
