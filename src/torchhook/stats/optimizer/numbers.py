"""Statistics over steps, of norms and ratios: each parameter has one value per step."""

from __future__ import annotations

import torch
from torch import Tensor

from torchhook.core.torch_internals import norms_of_each
from torchhook.stats import Moments
from torchhook.stats.cell import Cell
from torchhook.stats.kernels.plain import empty_moments, moments_of_each
from torchhook.stats.optimizer.notes import NOTES
from torchhook.stats.shelf import Block, Shelf


class OverSteps(Moments):
    """Moments of one number per step: too few for the several rows of a GPU kernel."""

    def empty(self, x: Tensor) -> Tensor:
        return empty_moments(x.device)


_OVER = OverSteps()


class Numbers:
    """Statistics over steps of numbers that each parameter has once per step."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.cells: dict[tuple[str, str], Cell] = {}

    def cell(self, path: str, port: str) -> Cell:
        """The cell of one number of one parameter."""
        found = self.cells.get((path, port))
        if found is None:
            found = self.cells[path, port] = Cell(self.shelf, [_OVER], f"the {port} of {path!r}", note=NOTES[port])
        return found

    def measure(self, values: dict[tuple[str, str], Tensor]) -> None:
        """Add the numbers of one step, by path and port: all together, since each operation costs about the same."""
        by_block: dict[Block, dict[int, Tensor]] = {}
        for place, value in values.items():
            cell = self.cell(*place)
            if value.device not in cell.places:
                cell.turn_to(value)
            cell.seen = True
            [(block, number)] = cell.places[value.device].values()
            by_block.setdefault(block, {})[number] = value
        for block, found in by_block.items():
            for numbers in _runs(sorted(found)):
                block.merge(moments_of_each(torch.stack([found[number] for number in numbers])), numbers.start)


def norms_of(tensors: dict[str, Tensor], quick: bool = False) -> dict[str, Tensor]:
    """The norms of all tensors, computed together, in double precision.

    `quick` uses single precision on the CPU, where double is slow, except for norms that are out of its range.

    >>> {name: round(float(norm)) for name, norm in norms_of({"a": torch.ones(4), "b": torch.zeros(4)}).items()}
    {'a': 2, 'b': 0}
    """
    values = list(tensors.values())
    if not values or not quick or any(x.device.type != "cpu" for x in values):
        return dict(zip(tensors, norms_of_each(values, 2, torch.float64) if values else (), strict=True))
    norms = torch.stack([norm.double() for norm in norms_of_each(values, 2)])
    held = ((norms > 1e-15) & (norms < 1e15)).tolist()  # whose squares neither vanish nor overflow
    return {
        path: norm if ok else torch.linalg.vector_norm(tensors[path], dtype=torch.float64)
        for path, norm, ok in zip(tensors, norms, held, strict=True)
    }


def _runs(numbers: list[int]) -> list[range]:
    """Sorted numbers as ranges without gaps.

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
