"""A module that runs a model and returns the features of some of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.selection import Query, Selector, select
from torchhook.core.session import Session
from torchhook.core.snapshot import lazily_copied
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import version_of
from torchhook.core.trees import mapped


class FeatureExtractor(nn.Module):
    """A module that runs `model` and returns a dict of the outputs of `layers`, with their autograd graph.

    With `stop` the forward ends once all layers were seen. For a layer that is called several times the dict has a
    list; note that `stop` may end the forward before its later calls.

    >>> import torch
    >>> backbone = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> features = FeatureExtractor(backbone, ["0", "1"])(torch.ones(2, 4))
    >>> {path: tuple(feature.shape) for path, feature in features.items()}
    {'0': (2, 3), '1': (2, 3)}
    """

    def __init__(self, model: nn.Module, layers: Iterable[Query], stop: bool = True) -> None:
        super().__init__()
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            raise TypeError(f"layers must be a list of names or other queries, not {layers!r}")
        self.layers = list(layers)
        if not self.layers:
            raise ValueError("layers is empty; name at least one layer of the model")
        select(model, *self.layers)  # a wrong name raises now, not at the first forward
        self.model = model
        self.stop = stop

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run the model; returns the features by path, in execution order."""
        seen: dict[str, list[Any]] = {}

        def keep(event: Event) -> None:
            seen.setdefault(event.path, []).append(mapped(Feature, event.live))

        with Session(self.model, [Tap(Selector.union(self.layers), keep)], stop=self.stop) as session:
            self.model(*args, **kwargs)
        features = {
            path: [mapped(Feature.get, output, Feature) for output in outputs] for path, outputs in seen.items()
        }
        features |= {name: features[path] for name, path in session.aliases.items() if path in features}
        return {path: outputs[0] if len(outputs) == 1 else outputs for path, outputs in features.items()}


class Feature:
    """An output as it was: the tensor itself unless it was overwritten, so that later features depend on it."""

    __slots__ = ("copy", "live", "version")

    def __init__(self, live: Tensor) -> None:
        self.live = live
        self.copy = lazily_copied(live)
        self.version = None if live.is_inference() else version_of(live)

    def get(self) -> Tensor:
        """The tensor, or a copy of its value then if it was overwritten since."""
        return self.live if self.version is not None and version_of(self.live) == self.version else self.copy
