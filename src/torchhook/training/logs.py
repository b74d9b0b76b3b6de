"""Where a monitor writes: a `Log` is given an `Entry` for every measured step, the findings, and in the end a report.

The run store, TensorBoard, MLflow and all others are logs over this one stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor

from torchhook.core.findings import Finding, Report
from torchhook.rules.check import layers_of
from torchhook.stats.reading import Snapshot

_SHOWN = ("mean", "std", "zero_fraction", "grad_norm", "norm", "update_ratio")


@dataclass(frozen=True)
class Entry:
    """What was seen in a measured step: plain data, on the CPU.

    `losses` are those of all steps since the entry before, `maps` some channels × height × width of what layers gave
    for one sample, by path; `wires` the pairs of layers of which the second is given what comes of the first. Most
    entries have neither.
    """

    step: int
    time: float  # in seconds since 1970
    snapshot: Snapshot
    losses: Mapping[int, float] = field(default_factory=dict)
    rate: float | None = None  # the largest learning rate
    maps: Mapping[str, Tensor] = field(default_factory=dict)
    wires: Sequence[tuple[str, str]] = ()

    @cached_property
    def scalars(self) -> dict[str, float]:
        """The numbers that people plot, as ``"grad_norm/layer1.0.weight"``, and those of the whole model.

        >>> from torchhook.stats.reading import Snapshot
        >>> Entry(3, 0.0, Snapshot({}), losses={2: 0.7, 3: 0.5}).scalars
        {'loss': 0.5}
        """
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


class Log:
    """Somewhere to write what a monitor sees; override what you want to hear of.

    Everything is called from one thread and in order, after the training has gone on; or, if `in_step` is set, from the
    training's own thread at its next step, for libraries that ask for that. What a log raises ends that log alone.

    >>> class Printing(Log):
    ...     def found(self, finding):
    ...         print("found:", finding)
    >>> Printing().found(Finding("TH601", "warning", "the loss does not fall"))
    found: TH601 warning: the model: the loss does not fall
    """

    in_step: ClassVar[bool] = False

    def begin(self, about: Mapping[str, Any]) -> None:
        """A training begins; `about` are the names, versions and settings, as JSON knows them.

        It is called where the monitor is made, in the training's own thread.
        """

    def write(self, entry: Entry) -> None:
        """A measured step is over."""

    def found(self, finding: Finding) -> None:
        """Something is wrong that was not known before."""

    def keep(self, report: Report, step: int) -> None:
        """The report as it is at `step`: a training that is killed has no end."""

    def end(self, report: Report, state: str) -> None:
        """The training is over: it has ``"ended"``, ``"failed"`` or was ``"interrupted"``."""
