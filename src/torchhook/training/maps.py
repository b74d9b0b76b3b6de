"""Samples of what layers see: some feature maps of one sample, copied to the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.passes import Pass, Scope
from torchhook.core.site import Site
from torchhook.core.tap import Act, Sink, Tap, at_once
from torchhook.core.transfer import sent_home
from torchhook.stats.clock import Clock, Tick

_LAYERS = 8  # that are shown
_CHANNELS = 16  # of each
_KINDS = (nn.modules.conv._ConvNd, nn.modules.conv._ConvTransposeNd)


class Maps(Sink):
    """Keeps, of the steps that `clock` measures, the maps of the first sample that each layer gave last."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.latest: dict[str, Tensor] = {}

    def taps(self, model: nn.Module) -> list[Tap]:
        """Where to look: at some convolutions, from the first to the last."""
        paths = [path for path, module in model.named_modules() if path and isinstance(module, _KINDS)]
        chosen = [paths[round(number * (len(paths) - 1) / (_LAYERS - 1))] for number in range(_LAYERS)] if paths else []
        return [Tap(path, self) for path in dict.fromkeys(chosen)]

    def receive(self, event: Event) -> None:
        """Keep one event's value. (In a session, acts bound for each site do this without events.)"""
        self.keep(event.path, event.value)

    def bind(self, tap: Tap, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act that keeps what one layer gives."""
        page = scope.keep(self.clock)

        def see(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
            tick = pass_.pages[page]
            if self.clock.measures() if pass_.outside else isinstance(tick, Tick) and tick.active:
                self.keep(site.path, value)

        return at_once(see)

    def keep(self, path: str, value: Any) -> None:
        """What is at `path` is this now."""
        if isinstance(value, Tensor) and value.dim() == 4 and len(value):
            self.latest[path] = value.detach()[0, :_CHANNELS].clone()

    def taken(self) -> Callable[[], Mapping[str, Tensor]]:
        """What was kept, on its way to the host; how to read it there."""
        readers = {path: sent_home(maps.float()) for path, maps in self.latest.items()}
        self.latest = {}
        return lambda: {path: read() for path, read in readers.items()}
