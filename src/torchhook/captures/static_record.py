"""Recording into buffers that stay where they are, so that a CUDA graph fills them when it is replayed.

A replay runs no Python: what it must record has to be part of the graph. A copy into a buffer is, as long
as the buffer was there before the graph was captured.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchhook.captures.record import Gradients
from torchhook.captures.store import Store
from torchhook.core.errors import TapError
from torchhook.core.event import Event
from torchhook.core.passes import Pass, Scope
from torchhook.core.site import Site
from torchhook.core.tap import Act, Receive, Sink, Tap
from torchhook.core.trees import Address, leaves, mapped


class StaticRecord(Sink):
    """Writes the values at its sites into buffers, one for every call of a pass, made in the first pass.

    The store lists the buffers themselves: what is read from it changes with the next pass or replay.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.buffers: dict[tuple[Site, int, int], Tensor] = {}  # by call and number of the leaf

    def receive(self, event: Event) -> None:
        """Keep one event's value. (In a session, acts bound for each site do this without events.)"""
        page = self.store.newest_page(event.pass_number)
        kept = self._filled(event.site, event.call, event.live)
        self.store.put(page, self.store.site_number(event.site), event.call, kept)

    def bind(self, tap: Tap, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act that fills the buffers of one site."""
        number, position, store = self.store.site_number(site), scope.keep(self.store), self.store

        def record(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
            store.put(pass_.pages[position], number, call, self._filled(site, call, value))

        def record_gradients(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Receive:
            gradients = Gradients(value)
            store.put(pass_.pages[position], number, call, gradients)

            def receive(leaf: int, address: Address, gradient: Tensor) -> None:
                gradients.found[leaf] = self._buffer(site, call, leaf, gradient)

            return receive

        return record_gradients if site.port in ("grad_input", "grad_output") else record

    def _filled(self, site: Site, call: int, value: Any) -> Any:
        numbers = iter(range(sum(1 for _ in leaves(value))))
        return mapped(lambda tensor: self._buffer(site, call, next(numbers), tensor), value)

    def _buffer(self, site: Site, call: int, leaf: int, tensor: Tensor) -> Tensor:
        buffer = self.buffers.get((site, call, leaf))
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                raise TapError(
                    f"static=True has no buffer for the {site} yet, and none can be made while a CUDA graph is being"
                    " captured; run the model once, with the same shapes, before that"
                )
            buffer = self.buffers[site, call, leaf] = torch.empty_like(tensor, requires_grad=False)
        with torch.no_grad():
            return buffer.copy_(tensor)
