"""Where a monitor writes: a `Log` gets an `Entry` for every measured step, the findings, and finally the report.

The run on disk, TensorBoard, MLflow and all others are logs of this one stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, ClassVar

from torchhook.core.findings import Finding, Report
from torchhook.core.shown import Shown
from torchhook.rules.entry import Entry

__all__ = ["Entry", "Log", "Target", "targets"]


class Log(Shown):
    """Receives what a monitor measures and finds; override the methods that you need.

    All methods are called from one thread and in order, while the training continues. With `in_step` set, they are
    called from the training's own thread at its next step, for libraries that require that. An exception in a log ends
    that log only.

    >>> class Printing(Log):
    ...     def found(self, finding):
    ...         print("found:", finding)
    >>> Printing().found(Finding("TH601", "warning", "the loss does not fall"))
    found: TH601 warning: the model: the loss does not fall
    """

    in_step: ClassVar[bool] = False

    def begin(self, about: Mapping[str, Any]) -> None:
        """A training begins; `about` has names, versions and settings as JSON values.

        This is called when the monitor is created, in the training's own thread.
        """

    def write(self, entry: Entry) -> None:
        """A measured step has ended."""

    def found(self, finding: Finding) -> None:
        """Something new was found."""

    def keep(self, report: Report, step: int) -> None:
        """The report as of `step`, since a training that is killed never calls `end`."""

    def end(self, report: Report, state: str) -> None:
        """The training is over; `state` is ``"ended"``, ``"failed"`` or ``"interrupted"``."""


Target = Log | str | PathLike[str]
"""Where to write: a log, or a folder that gets a new run."""


def targets(to: Target | Iterable[Target]) -> list[Target]:
    """One target or several, as a list.

    >>> targets("runs"), targets(["runs", Log()])
    (['runs'], ['runs', Log()])
    """
    if isinstance(to, (Log, str, PathLike)):
        return [to]
    listed = list(to) if isinstance(to, Iterable) else [to]
    for one in listed:
        if not isinstance(one, (Log, str, PathLike)):
            raise TypeError(f"to must be a folder, a log or a list of them, not {one!r:.80}")
    return listed
