"""`Entry`: one measured step, as a log is given it, a history keeps it and a run returns it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from torchhook.rules.loop import Loop
from torchhook.rules.loss_graph import LossTerm
from torchhook.rules.ranks import RankStep
from torchhook.stats.reading import Snapshot

_SHOWN = ("mean", "std", "zero_fraction", "grad_norm", "norm", "update_ratio")


@dataclass(frozen=True)
class Entry:
    """One measured step, as plain data on the CPU. It unpacks to ``step, snapshot``.

    `losses` and `rates` (the largest learning rates) cover every step since the previous entry. `maps` are feature maps
    of one sample (channels × height × width) by layer path. `wires` are pairs of layers whose first feeds the second.
    `lines` are the source lines of the calls, by layer path, and `shapes` those of the outputs. Most entries have none
    of the four. `terms` is what the loss compares, by step, and `loop` what the script did so far between its steps, if
    that was seen. `ranks` is what each of several ranks saw, whose statistics are merged in `snapshot`; before they
    are, `local` has what only one rank is asked.
    """

    step: int
    time: float  # in seconds since 1970
    snapshot: Snapshot
    losses: Mapping[int, float] = field(default_factory=dict)
    rate: float | None = None  # the largest learning rate at this step
    maps: Mapping[str, Tensor] = field(default_factory=dict)
    wires: Sequence[tuple[str, str]] = ()
    rates: Mapping[int, float] = field(default_factory=dict)
    terms: Mapping[int, Sequence[LossTerm]] = field(default_factory=dict)
    loop: Loop | None = None
    lines: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, str] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    ranks: RankStep | None = None

    def __iter__(self) -> Iterator[Any]:
        yield self.step
        yield self.snapshot

    @cached_property
    def scalars(self) -> dict[str, float]:
        """The numbers worth plotting: those of the whole model, and by layer as ``"grad_norm/layer1.0.weight"``.

        >>> from torchhook.stats.reading import Snapshot
        >>> Entry(3, 0.0, Snapshot({}), losses={2: 0.7, 3: 0.5}).scalars
        {'loss': 0.5}
        """
        from torchhook.rules.check import layers_of  # which reads histories of entries

        whole: dict[str, float] = {}
        if self.losses:
            whole["loss"] = self.losses[max(self.losses)]
        if self.rate is not None:
            whole["learning_rate"] = self.rate
        layers = layers_of(self.snapshot)
        norms = [layer["grad_norm"] for layer in layers if layer["kind"] == "parameter" and "grad_norm" in layer]
        if norms:
            whole["grad_norm"] = math.sqrt(sum(norm * norm for norm in norms))
        return whole | {f"{name}/{layer['site']}": layer[name] for name in _SHOWN for layer in layers if name in layer}
