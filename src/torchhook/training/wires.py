"""How layers are connected: which layers the input of a layer comes from, according to the graph of autograd.

That graph includes what is computed between modules, such as sums and concatenations. Without gradients there is no
graph, and only a tensor that goes straight from one layer to the next is followed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchhook.core.event import Event
from torchhook.core.selection import Selector, walk
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of, user_line
from torchhook.core.trees import leaves
from torchhook.rules.watch import is_leaf

_FAR = 10_000  # nodes of the graph that are visited for one input


class Wires(Sink):
    """Collects, while it is attached, the `pairs` of layers whose first feeds the second.

    Of each layer, it also collects the line of the call and the shape of the output.

    >>> import torch
    >>> from torchhook import Session
    >>> wires, model = Wires(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with Session(model, wires.taps(model)):
    ...     _ = model(torch.ones(1, 2))
    >>> list(wires.pairs), wires.shapes
    ([('0', '1')], {'0': '1×2', '1': '1×2'})
    """

    lazy = True

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], None] = {}
        self.lines: dict[str, str] = {}  # the source line of the first call of each layer
        self.shapes: dict[str, str] = {}  # the shape of its output then
        self._made_by: dict[Any, str] = {}  # by node of the graph, which this keeps alive
        self._given_by: Any = WeakTensorKeyDictionary()

    def taps(self, model: nn.Module) -> list[Tap]:
        """Taps at the input and the output of every leaf."""
        paths = [path for path, module in walk(model) if path and is_leaf(module, detours=False)]
        return [Tap(Selector.union(paths), self, port) for port in ("input", "output")] if paths else []

    def receive(self, event: Event) -> None:
        """Look at one side of a layer."""
        if not event.recomputed:
            inputs = (event.args, event.kwargs)
            self._see(event.site, inputs if event.port == "input" else event.live)

    def _see(self, site: Site, value: Any) -> None:
        tensors = [tensor for _, tensor in leaves(value)]
        if site.port == "input":
            if site.path not in self.lines:
                self.lines[site.path] = user_line()
            self.pairs |= {(source, site.path): None for tensor in tensors for source in self._sources(tensor)}
            return
        self.shapes.setdefault(site.path, shape_of(value))
        for tensor in tensors:
            if tensor.grad_fn is None:
                self._given_by[tensor] = site.path
            else:
                self._made_by[tensor.grad_fn] = site.path

    def _sources(self, tensor: Tensor) -> Iterator[str]:
        if tensor.grad_fn is None:
            yield from _known(self._given_by.get(tensor))
            return
        waiting: list[Any] = [tensor.grad_fn]
        seen: set[Any] = set()
        while waiting and len(seen) < _FAR:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._made_by:
                yield self._made_by[node]
            else:
                waiting += [before for before, _ in node.next_functions]


def _known(path: str | None) -> Iterable[str]:
    return () if path is None else (path,)
