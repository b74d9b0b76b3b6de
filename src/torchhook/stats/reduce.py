"""`Reduce`: the sink that reduces what flows to statistics at once, and keeps no tensor of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.trees import Address, leaves
from torchhook.stats import Stat, named
from torchhook.stats.cell import Cell, making
from torchhook.stats.clock import Clock
from torchhook.stats.reading import Snapshot
from torchhook.stats.shelf import Shelf, sent

NOTES = {
    "input": "what the module was called with, in every call",
    "output": "what the module returned, in every call",
    "grad_input": "as computed by the backward; scaled like the loss, if that is scaled",
    "grad_output": "as computed by the backward; scaled like the loss, if that is scaled",
    "param": "as used by the forward, in every pass",
    "param_grad": "as accumulated after every backward; scaled like the loss, if that is scaled",
}
"""What exactly is measured, by port."""


class Reduce(Sink):
    """Adds the values at its sites to statistics, which are `Stat` objects or their names.

    >>> from torchhook import Reduce, Session, Tap
    >>> model, reduce = nn.Sequential(nn.ReLU()), Reduce("moments")
    >>> with Session(model, [Tap("0", reduce)]):
    ...     for value in (-1.0, 1.0, 3.0):
    ...         _ = model(torch.tensor([value]))
    >>> reading = reduce.snapshot()["0"]
    >>> reading.count, reading.max
    (3, 3.0)
    """

    lazy = True

    def __init__(self, *stats: Stat | str, clock: Clock | None = None) -> None:
        self.stats = [named(stat) for stat in stats or ("moments",)]
        by_key: dict[str, Stat] = {}
        for stat in self.stats:
            other = by_key.setdefault(stat.key, stat)
            shares = type(stat).update is type(other).update and stat.name != other.name
            if other is not stat and not shares:
                raise ValueError(f"{other!r} and {stat!r} have the same name; give one of them another")
        self.clock = clock or Clock()
        self.shelves = [Shelf()]
        self.cells: dict[tuple[str, str], Cell] = {}  # by path, and port with the address of the tensor
        self._by_site: dict[Site, dict[Address, Cell]] = {}  # the same cells, for a quick look-up

    @property
    def keeper(self) -> Clock:
        """The clock says with every pass whether it is measured."""
        return self.clock

    def expect(self, event: Event) -> Any:
        """Want the gradients of measured passes."""
        if not event.page.measured():
            return None
        cells = self._cells_at(event.site)
        for address, _ in leaves(event.live):  # now, since gradients come in another order
            if address not in cells:
                cells[address] = self.cell(event.site, event.module, address)
        return True

    def receive(self, event: Event) -> None:
        """Add one value or gradient."""
        port = event.site.port
        if port == "param_grad":
            if not self.clock.is_backward_measured():
                return
        elif (event.expected is None and not event.page.measured()) or (port == "param" and event.call):
            return
        self._add(event, event.live if event.transform is None else event.value)

    def _add(self, event: Event, value: Any) -> None:
        """Add every tensor in `value`."""
        if event.site.port == "input" and event.transform is None and len(event.args) + len(event.kwargs) > 1:
            value = {**dict(enumerate(event.args)), **event.kwargs}  # positions and names are the keys
        cells, site = self._cells_at(event.site), event.site
        found = [(event.leaf, value)] if isinstance(value, Tensor) else leaves(value)
        for address, tensor in found:
            cell = cells.get(address)
            if cell is None:
                cell = cells[address] = self.cell(site, event.module, address)
            cell.update(tensor)

    def _cells_at(self, site: Site) -> dict[Address, Cell]:
        cells = self._by_site.get(site)
        if cells is None:
            cells = self._by_site[site] = {}
        return cells

    def cell(self, site: Site, module: nn.Module | None, address: Address = ()) -> Cell:
        """The cell of the tensor at `address` in the value at `site`."""
        key = site.path, site.port + "".join(f"[{step!r}]" for step in address)
        with making:
            if key not in self.cells:
                module = None if "param" in site.port else module
                label = "" if module is None else type(module).__name__
                stats = [stat.bound(module) for stat in self.stats]
                self.cells[key] = Cell(
                    self.shelves[0], stats, f"the {key[1]} of {site.path!r}", label, NOTES.get(site.port, "")
                )
            return self.cells[key]

    def snapshot(self) -> Snapshot:
        """What was measured so far. This does not wait for the device; reading the snapshot does."""
        with torch.no_grad():
            readers = sent(block for shelf in self.shelves for block in shelf)
        rows = {place: cell.row(readers) for place, cell in self.cells.items() if cell.seen}
        return Snapshot(rows, stats=self.stats)

    def reset(self) -> None:
        """Forget what was measured so far."""
        with torch.no_grad():
            for shelf in self.shelves:
                for block in shelf:
                    block.reset()
        for cell in self.cells.values():
            cell.seen = False
