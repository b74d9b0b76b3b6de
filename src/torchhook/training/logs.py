"""Where a monitor writes: a `Log` is given an `Entry` for every measured step, the findings, and in the end a report.

The run store, TensorBoard, MLflow and all others are logs over this one stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torchhook.core.findings import Finding, Report
from torchhook.rules.entry import Entry

__all__ = ["Entry", "Log"]


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
