"""Recording into fixed buffers, which a CUDA graph fills when it is replayed.

A replay does not run Python, so recording has to be part of the graph. A copy into a buffer is, as long as the buffer
existed before the graph was captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchhook.captures.store import Store
from torchhook.core.errors import TapError
from torchhook.core.event import Event
from torchhook.core.kept_gradients import KeptGradients
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.trees import Arguments, leaves, mapped


class StaticRecord(Sink):
    """Writes the values at its sites into buffers, one for every call of a pass, made in the first pass.

    The store holds the buffers themselves: the next pass or replay overwrites the values that were read from it.
    """

    lazy = True

    def __init__(self, store: Store) -> None:
        self.store = store
        self.buffers: dict[tuple[Site, int, int], Tensor] = {}  # by call and number of the leaf

    @property
    def keeper(self) -> Store:
        """The store begins a page with every pass."""
        return self.store

    def expect(self, event: Event) -> KeptGradients:
        """Reserve the place of a gradient, in execution order."""
        gradients = KeptGradients.of(event.live)
        self.store.put(event.page, self.store.site_number(event.site), event.call, gradients)
        return gradients

    def receive(self, event: Event) -> None:
        """Fill the buffers with one value or gradient."""
        site, call = event.site, event.call
        if event.expected is not None:
            event.expected.found[event.leaf_number] = self._buffer(site, call, event.leaf_number, event.live)
            return
        live = Arguments(event.args, event.kwargs) if site.port == "input" else event.live
        self.store.put(event.page, self.store.site_number(site), call, self._filled(site, call, live))

    def _filled(self, site: Site, call: int, value: Any) -> Any:
        numbers = iter(range(sum(1 for _ in leaves(value))))
        return mapped(lambda tensor: self._buffer(site, call, next(numbers), tensor), value)

    def _buffer(self, site: Site, call: int, leaf: int, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get((site, call, leaf))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                raise TapError(
                    f"static=True has no buffer for the {site} yet, and cannot make one while a CUDA graph is being"
                    " captured; run the model once with the same shapes before capturing the graph"
                )
            buffer = self.buffers[site, call, leaf] = torch.empty_like(tensor, requires_grad=False)
        with torch.no_grad():
            return buffer.copy_(tensor)
