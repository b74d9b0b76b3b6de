"""The features of layers for the samples of two data sets, or for some of the samples, drawn at random."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torchhook.compare import distances
from torchhook.compare.features import FeatureReader, LayerCall
from torchhook.core.batch import batch_count
from torchhook.core.progress import Progress, track


def read_samples(
    reader: FeatureReader,
    loaders: Mapping[str, Iterable[Any]],
    call: int | None,
    most: int,
    start: torch.Generator,
    progress: Progress,
) -> dict[LayerCall, LayerSamples]:
    """The features of each layer call for all samples of the loaders, or for `most` of each drawn at random.

    For each layer the draws begin with the state of `start`, as they do if it is the only one.
    """
    layers: dict[LayerCall, LayerSamples] = {}
    for name, loader in loaders.items():
        samples = 0

        def take(layer_call: LayerCall, rows: Tensor | str, name: str = name) -> None:
            if call is None or layer_call.call == call:
                if layer_call not in layers:
                    layers[layer_call] = LayerSamples(layer_call, most, _copy(start))
                layers[layer_call].add(name, rows)

        for batch in track(loader, batch_count(loader), name, progress):
            samples += reader.run(batch, take)
        if samples < distances.FOLDS:
            raise ValueError(f"{name} has {samples} samples, but {distances.FOLDS} are needed")
        for layer in layers.values():
            layer.end(name, samples)
    return layers


def _copy(generator: torch.Generator) -> torch.Generator:
    copied = torch.Generator(generator.device)
    copied.set_state(generator.get_state())
    return copied


class LayerSamples:
    """The features of one layer call in both data sets, or the reason why they cannot be compared."""

    def __init__(self, call: LayerCall, most: int, draw: torch.Generator) -> None:
        self.call = call
        self.draw = draw
        self.sides = {name: Reservoir(most, draw) for name in ("source", "target")}
        self.reason = ""

    def add(self, name: str, rows: Tensor | str) -> None:
        """Add the features of a batch."""
        if isinstance(rows, str):
            self.reason = self.reason or f"{self.call} cannot be compared: {rows}"
        elif not self.reason:
            self.reason = self.sides[name].add(self.call, rows.to(torch.float64, copy=True))  # it may be overwritten

    def end(self, name: str, samples: int) -> None:
        """Note that a data set is over, which had so many samples."""
        if not self.reason and self.sides[name].seen != samples:
            self.reason = f"{self.call} was not called in every batch of {name}"

    def features(self) -> tuple[Tensor, Tensor]:
        """The features of the samples of source and of target; raise if they cannot be compared."""
        kept = {name: side.rows for name, side in self.sides.items()}
        x, y = kept["source"], kept["target"]
        if self.reason or x is None or y is None:
            raise ValueError(self.reason or f"{self.call} was not called for both source and target")
        for name, rows in kept.items():
            if rows is not None and not rows.isfinite().all():
                raise ValueError(
                    f"{self.call} has values that are not finite for {name}; torchhook.diagnose finds their origin"
                )
        if x.shape[1] != y.shape[1]:
            raise ValueError(
                f"{self.call} has {x.shape[1]} features per sample for source and {y.shape[1]} for target; pass"
                " pool='mean' or a function that makes them equal"
            )
        return x, y


class Reservoir:
    """A random sample of at most `most` rows: each row gets a random number, and the smallest stay."""

    def __init__(self, most: int, draw: torch.Generator) -> None:
        self.most = most
        self.draw = draw
        self.seen = 0
        self.rows: Tensor | None = None
        self._sum: Tensor | float = 0.0  # of all rows, also of those that are not kept
        self._chances = torch.zeros(0, dtype=torch.float64)

    @property
    def mean(self) -> Tensor:
        """The mean of all rows, also of those that are not kept."""
        return torch.as_tensor(self._sum / self.seen)

    def add(self, layer_call: LayerCall, rows: Tensor) -> str:
        """Keep some of `rows`, perhaps instead of others; the reason why this is impossible, or nothing."""
        if self.rows is not None and rows.shape[1] != self.rows.shape[1]:
            return (
                f"{layer_call} had {self.rows.shape[1]} features per sample and now has {rows.shape[1]}; pass"
                " pool='mean' for one feature per channel"
            )
        self.seen += len(rows)
        self._sum = self._sum + rows.sum(0)
        chances = torch.rand(len(rows), generator=self.draw, dtype=torch.float64)
        chances = torch.cat([self._chances, chances])
        rows = rows if self.rows is None else torch.cat([self.rows, rows])
        if len(rows) > self.most:
            least = chances.topk(self.most, largest=False, sorted=False).indices
            chances, rows = chances[least], rows[least.to(rows.device)]
        self._chances, self.rows = chances, rows
        return ""
