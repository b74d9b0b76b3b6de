"""The features that layers of a model compute for a batch: for every call a matrix with one row per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, Samples, call, fitted, samples_of
from torchhook.core.event import Event
from torchhook.core.model_state import evaluating, random_state_kept
from torchhook.core.selection import Query, Selector, queries_of
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.snapshot import frozen
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves
from torchhook.stats import Channels
from torchhook.stats.stat import counted

Pool: TypeAlias = Literal["flatten", "mean"] | Callable[[Tensor], Tensor]
"""How the output of a layer becomes one row per sample: flattened, the mean of each channel, or by a function."""


class LayerCall(NamedTuple):
    """One call of a layer: the path of the module and the number of the call in the pass."""

    path: str
    call: int

    def __str__(self) -> str:
        return f"{self.path or 'the model'!r}" + (f" (call {self.call})" if self.call else "")


Take = Callable[[LayerCall, "Tensor | str"], None]
"""Receives the features of a call, or the reason why it has none."""


class FeatureReader(Sink):
    """Runs a model on batches and passes on the features of its layers as soon as they are computed.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())
    >>> with FeatureReader(model, None, "flatten") as reader:
    ...     _ = reader.run(torch.ones(2, 3, 5, 5), lambda layer, rows: print(layer, tuple(rows.shape)))
    '0' (2, 100)
    '1' (2, 100)
    """

    lazy = True

    def __init__(self, model: nn.Module, sites: Query | Iterable[Query] | None, pool: Pool) -> None:
        self.model = model
        self.pool = pool
        self._samples = Samples(0, "")
        self._take: Take | None = None  # only during run(): other code may call the same modules
        self._open = ExitStack()
        # if sites is None, layers that are never called are in `silent`
        tap = Tap(Selector.union(queries_of(sites)), self)
        self._session = Session(model, [tap], on_silent="ignore" if sites is None else None)

    def __enter__(self) -> FeatureReader:
        with ExitStack() as opening:
            opening.enter_context(random_state_kept(self.model))
            opening.enter_context(evaluating(self.model))
            self._session.open()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            self._session.__exit__(kind, error, trace)

    @property
    def silent(self) -> dict[str, str]:
        """The paths that were never called, and why. Only complete after the last batch."""
        return {site.path: reason for site, reason in self._session.silent.items()}

    def run(self, data: Any, take: Take) -> int:
        """Run the model on one batch and return its number of samples."""
        batch = Batch.of(fitted(data, self.model))
        self._samples, self._take = samples_of(batch), take
        try:
            with torch.no_grad():
                call(self.model, batch)
        finally:
            self._take = None
        return self._samples.length

    def receive(self, event: Event) -> None:
        """Pass on the features of one value, while a batch runs."""
        if self._take is not None:
            layer_call = LayerCall(event.path, event.call)
            self._take(layer_call, rows_of(event.live, event.module, self._samples, self.pool))


def rows_of(value: Any, module: nn.Module, samples: Samples, pool: Pool) -> Tensor | str:
    """The features of the samples in the output of `module`, or the reason why there are none."""
    found = next((leaf for _, leaf in leaves(value) if leaf.is_floating_point()), None)
    if found is None:
        return "its output has no floating-point tensor"
    x: Any = counted(found)
    if callable(pool):
        x = pool(frozen(x))
    elif pool == "mean" and x.dim() > 2:
        units = Channels().bound(module)
        assert isinstance(units, Channels)
        x = x.movedim(units.placed(x)[1], 1).flatten(2).mean(2)
    if not isinstance(x, Tensor):
        return f"pool returned a {type(x).__name__}, not a tensor"
    if not x.dim() or len(x) != samples.length:
        return (
            f"its output is {shape_of(x)} for a batch of {samples.length} (the length of argument {samples.argument}),"
            " which is not one row per sample; pass a function as pool= that returns rows"
        )
    rows = x.reshape(len(x), -1)
    return rows if rows.is_floating_point() else rows.float()


def require_pool(pool: Any) -> None:
    """Raise unless `pool` is a known name or a function."""
    if not (callable(pool) or pool in ("flatten", "mean")):
        raise ValueError(f"pool must be 'flatten', 'mean' or a function from an output to rows, not {pool!r}")
