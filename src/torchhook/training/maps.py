"""Feature maps of one sample at some layers, copied to the host without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.sink import Sink
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from torchhook.core.transfer import sent_home
from torchhook.stats.clock import Clock

_LAYERS = 8  # at most
_CHANNELS = 16  # of each layer, at most
_KINDS = (CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS)


class Maps(Sink):
    """Keeps the feature maps of the first sample at each layer, from the last step that `clock` measures."""

    lazy = True

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.latest: dict[str, Tensor] = {}

    def taps(self, model: nn.Module) -> list[Tap]:
        """Taps at some convolutions, evenly spread from the first to the last."""
        paths = [path for path, module in model.named_modules() if path and isinstance(module, _KINDS)]
        chosen = [paths[round(number * (len(paths) - 1) / (_LAYERS - 1))] for number in range(_LAYERS)] if paths else []
        return [Tap(path, self) for path in dict.fromkeys(chosen)]

    @property
    def keeper(self) -> Clock:
        """The clock says with every pass whether it is measured."""
        return self.clock

    def receive(self, event: Event) -> None:
        """Keep the maps of one layer."""
        if event.page.measured():
            self.keep(event.path, event.live)

    def keep(self, path: str, value: Any) -> None:
        """Keep a copy of the output of the layer at `path`."""
        if isinstance(value, Tensor) and value.dim() == 4 and len(value):
            self.latest[path] = value.detach()[0, :_CHANNELS].clone()

    def taken(self) -> Callable[[], Mapping[str, Tensor]]:
        """Send what was kept to the host, and return a function that reads it there."""
        readers = {path: sent_home(maps.float()) for path, maps in self.latest.items()}
        self.latest = {}
        return lambda: {path: read() for path, read in readers.items()}
