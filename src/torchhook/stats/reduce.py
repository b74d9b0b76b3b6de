"""Reducing what flows to statistics, at once: `Reduce` is the sink, and keeps no tensor of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.passes import Pass, Scope
from torchhook.core.site import Site
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Act, Receive, Sink, Tap, at_once
from torchhook.core.trees import Address, Arguments, leaves
from torchhook.stats import Stat, named
from torchhook.stats.cell import Cell, making
from torchhook.stats.clock import Clock, Tick
from torchhook.stats.reading import Snapshot
from torchhook.stats.shelf import Shelf, sent

NOTES = {
    "input": "what the module was called with, in every call",
    "output": "what the module returned, in every call",
    "grad_input": "as the backward computed it; scaled like the loss, if that is scaled",
    "grad_output": "as the backward computed it; scaled like the loss, if that is scaled",
    "param": "as the forward used it, in every pass",
    "param_grad": "as accumulated after every backward; scaled like the loss, if that is scaled",
}
"""What a number is about, by its port."""


class Reduce(Sink):
    """Adds the values at its sites to statistics, given as `Stat` objects or by their names.

    >>> from torchhook import Reduce, Session, Tap
    >>> model, reduce = nn.Sequential(nn.ReLU()), Reduce("moments")
    >>> with Session(model, [Tap("0", reduce)]):
    ...     for value in (-1.0, 1.0, 3.0):
    ...         _ = model(torch.tensor([value]))
    >>> reading = reduce.snapshot()["0"]
    >>> reading.count, reading.max
    (3, 3.0)
    """

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
        self.cells: dict[tuple[str, str], Cell] = {}  # by path, and port with what leads to the tensor

    def receive(self, event: Event) -> None:
        """Add one event's value. (In a session, acts bound for each site do this without events.)"""
        for address, leaf in leaves(event.value):
            self.cell(event.site, event.module, event.leaf + address).update(leaf)

    def bind(self, tap: Tap, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act that adds what is at one site."""
        reducing = Reducing(self, tap, site, module, scope.keep(self.clock))
        by_port: dict[str, Act] = {
            "grad_input": reducing.ask,
            "grad_output": reducing.ask,
            "input": reducing.see_input,
            "param": reducing.see_parameter,
            "param_grad": reducing.see_parameter_gradient,
        }
        return by_port.get(site.port, reducing.see)

    def cell(self, site: Site, module: nn.Module | None, address: Address = ()) -> Cell:
        """Where the tensor at `address` in the value at `site` is added up."""
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
        """What was seen until now, to read whenever; it does not wait for the device."""
        with torch.no_grad():
            readers = sent(block for shelf in self.shelves for block in shelf)
        rows = {place: cell.row(readers) for place, cell in self.cells.items() if cell.seen}
        return Snapshot(rows, stats=self.stats)

    def reset(self) -> None:
        """Begin anew."""
        with torch.no_grad():
            for shelf in self.shelves:
                for block in shelf:
                    block.reset()
        for cell in self.cells.values():
            cell.seen = False


class Reducing:
    """What a sink does at one site."""

    def __init__(self, reduce: Reduce, tap: Tap, site: Site, module: nn.Module, page: int) -> None:
        self.reduce = reduce
        self.tap = tap
        self.site = site
        self.module = module
        self.page = page  # where a pass has the clock's, which says whether it is measured
        self.cells: dict[Address, Cell] = {}

    def is_measured(self, pass_: Pass) -> bool:
        """Whether the clock says so."""
        if pass_.outside:  # calls that no pass contains: nobody says when a step of theirs ends
            return self.reduce.clock.measures()
        tick = pass_.pages[self.page]
        assert isinstance(tick, Tick)
        return tick.active

    @at_once
    def see(self, pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        """Add every tensor in `value`."""
        if self.is_measured(pass_):
            self.add(value)

    @at_once
    def see_input(self, pass_: Pass, call: int, value: Arguments, args: tuple[Any, ...]) -> None:
        """The same, of what the module is called with: positions and names are the keys."""
        if self.is_measured(pass_):
            both: dict[Any, Any] = {**dict(enumerate(value.args)), **value.kwargs}
            self.add(value.unwrapped() if len(both) == 1 else both)

    @at_once
    def see_parameter(self, pass_: Pass, call: int, value: Tensor, args: tuple[Any, ...]) -> None:
        """The same, once a pass, however often the module is called in it."""
        if not call and self.is_measured(pass_):
            self.add(value)

    @at_once
    def see_parameter_gradient(self, pass_: Pass, call: int, value: Tensor, args: tuple[Any, ...]) -> None:
        """The same, in the backward."""
        if self.reduce.clock.is_backward_measured():
            self.add(value)

    @at_once
    def ask(self, pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Receive | None:
        """Want the gradients of `value`."""
        if not self.is_measured(pass_):
            return None
        for address, _ in leaves(value):  # now, for gradients come in another order
            if address not in self.cells:
                self.cell(address)
        return self.receive

    def receive(self, leaf: int, address: Address, gradient: Tensor) -> None:
        """Add a gradient."""
        if self.tap.transform is not None:
            gradient = self.tap.transformed(snapshot(gradient), self.site)
        (self.cells.get(address) or self.cell(address)).update(gradient)

    def add(self, value: Any) -> None:
        """Add every tensor in `value`."""
        if self.tap.transform is not None:
            value = self.tap.transformed(snapshot(value), self.site)
        if isinstance(value, Tensor):
            (self.cells.get(()) or self.cell(())).update(value)
            return
        for address, leaf in leaves(value):
            (self.cells.get(address) or self.cell(address)).update(leaf)

    def cell(self, address: Address) -> Cell:
        """Where the tensor at `address` is added up."""
        cell = self.cells[address] = self.reduce.cell(self.site, self.module, address)
        return cell
