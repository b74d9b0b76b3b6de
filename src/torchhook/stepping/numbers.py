"""Statistics over steps: of norms and ratios, of which a parameter has one a step."""

from __future__ import annotations

import torch
from torch import Tensor

from torchhook.sinks.cell import Cell
from torchhook.sinks.shelf import Block, Shelf
from torchhook.stats import Moments
from torchhook.stats.kernels.plain import empty_moments, merged_moments, moments_of_each
from torchhook.stepping.notes import NOTES


class OverSteps(Moments):
    """Moments of a number a step: too few for the rows of a kernel."""

    def empty(self, x: Tensor) -> Tensor:
        return empty_moments(x.device)


class Numbers:
    """Statistics over steps of a number that each parameter has in a step."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.cells: dict[tuple[str, str], Cell] = {}

    def cell(self, path: str, port: str) -> Cell:
        """Where the numbers of one parameter are added up."""
        name = f"the {port} of {path!r}"
        return self.cells.setdefault((path, port), Cell(self.shelf, [OverSteps()], name, note=NOTES[port]))

    def measure(self, port: str, values: dict[str, Tensor]) -> None:
        """Add those of one step, by path."""
        by_block: dict[Block, dict[int, Tensor]] = {}
        for path, value in values.items():
            cell = self.cell(path, port)
            cell.turn_to(value)
            cell.seen = True
            [(block, number)] = cell.places[value.device].values()
            by_block.setdefault(block, {})[number] = value
        for block, found in by_block.items():
            for numbers in _runs(sorted(found)):
                rows = moments_of_each(torch.stack([found[number] for number in numbers]))
                states = block.states[numbers.start : numbers.stop]
                states.copy_(merged_moments(torch.stack([states, rows])))


def norms_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The norm of each, all in one go."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch._foreach_norm(list(tensors.values()), 2, torch.float64), strict=True))


def _runs(numbers: list[int]) -> list[range]:
    """Numbers in order as ranges without gaps.

    >>> _runs([0, 1, 2, 5])
    [range(0, 3), range(5, 6)]
    """
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
