"""The data behind the pages, kept in memory: only new steps are read, and not more than a screen can show."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from torchhook.core.findings import Finding, Severity
from torchhook.stats import Histogram
from torchhook.stats.downsample import spread, thinned
from torchhook.stats.histogram import Bins
from torchhook.training.runs import Run
from torchhook.training.runs.schema import FILE

WIDE = 240  # steps to draw; beyond twice as many, older ones are thinned out
LOSSES = 2000
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_HISTOGRAMS = 32  # steps of which the histograms are read


class Sheet:
    """One statistic by step (`rows`) and layer.

    As long as the `edition` stays the same, a page that has drawn some rows only needs to append the new ones.
    """

    def __init__(self, run: Run, field: str, port: str) -> None:
        self.run = run
        self.field = field
        self.port = port
        self.edition = _new_edition()
        self.steps: list[int] = []
        self.paths: list[str] = []
        self.rows: list[list[float | None]] = []

    def refresh(self) -> None:
        """Read new steps."""
        late = self.run.series(self.field, self.port, WIDE, after=self.steps[-1] if self.steps else None)
        if late.paths != self.paths and self.steps:  # there are new layers
            self.steps = []
            late = self.run.series(self.field, self.port, WIDE)
        if late.paths != self.paths:
            self.edition = _new_edition()
            self.paths, self.rows = late.paths, []
        self.steps = [*self.steps, *late.steps]
        self.rows = [*self.rows, *([_drawn(value) for value in row] for row in late.values.T.tolist())]
        if len(self.steps) > 2 * WIDE:
            gone = set(thinned(self.steps))
            kept = [number for number, step in enumerate(self.steps) if step not in gone]
            self.steps, self.rows = [self.steps[n] for n in kept], [self.rows[n] for n in kept]
            self.edition = _new_edition()

    def line(self, path: str) -> list[float | None]:
        """The values of one layer, by step."""
        number = self.paths.index(path) if path in self.paths else None
        return [] if number is None else [row[number] for row in self.rows]


class Curve:
    """The loss by step, as two lists."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.edition = _new_edition()
        self.steps: list[int] = []
        self.values: list[float | None] = []

    def refresh(self) -> None:
        """Read new steps."""
        late = self.run.losses_after(self.steps[-1] if self.steps else -1)
        some = spread(list(late), LOSSES)
        self.steps = [*self.steps, *some]
        self.values = [*self.values, *(_drawn(late[step]) for step in some)]
        if len(self.steps) > 2 * LOSSES:
            self.steps, self.values = self.steps[::2], self.values[::2]
            self.edition = _new_edition()


class Book:
    """A run and the sheets that pages have read from it."""

    def __init__(self, folder: Path) -> None:
        self.run = Run(folder)
        self.name = folder.name
        self._file = _identity(folder / FILE)
        self.lock = threading.RLock()  # callbacks come from several threads
        self._sheets: dict[tuple[str, str], Sheet] = {}
        self._curve = Curve(self.run)
        self._quantiles: dict[int, dict[tuple[str, str], list[float]]] = {}

    def is_there(self) -> bool:
        """Whether the file is still the one that was opened."""
        return self._file is not None and self._file == _identity(self.run.folder / FILE)

    def sheet(self, field: str, port: str) -> Sheet:
        """One statistic by step and layer, up to date."""
        with self.lock:
            sheet = self._sheets.setdefault((field, port), Sheet(self.run, field, port))
            sheet.refresh()
            return copy(sheet)  # which does not change while other threads read on

    def curve(self) -> Curve:
        """The losses, up to date."""
        with self.lock:
            self._curve.refresh()
            return copy(self._curve)

    def ports(self) -> list[str]:
        """The ports at which something was measured."""
        return list(dict.fromkeys(port.partition("[")[0] for _, port in self.run.places))

    def layers(self) -> dict[str, str]:
        """The class of each module that was measured, in execution order."""
        return {path: row.label for (path, _), row in self.run.places.items() if row.label}

    def sources(self) -> dict[str, list[str]]:
        """By layer, the layers whose outputs it receives, in execution order."""
        order = {path: number for number, path in enumerate(self.layers())}
        found: dict[str, list[str]] = {}
        for source, path in sorted(self.run.wires, key=lambda wire: order.get(wire[0], -1)):
            found.setdefault(path, []).append(source)
        return found

    def parameters(self, layer: str) -> list[str]:
        """The parameters of a layer."""
        paths = dict.fromkeys(path for path, port in self.run.places if port.startswith("param_grad"))
        return [path for path in paths if path.rpartition(".")[0] == layer]

    def stamp(self) -> list[Any]:
        """A value that changes when there is something new."""
        steps = self.run.steps
        return [len(steps), steps[-1] if steps else None, len(self.run.findings), self.run.state]

    def health(self) -> dict[str, Severity]:
        """The worst severity found at each site."""
        worst: dict[str, Severity] = {}
        for found in self._found():
            worst[found.site] = max(worst.get(found.site, found.severity), found.severity, key=lambda one: one.rank)
        return worst

    def findings_at(self, layer: str) -> list[Finding]:
        """The findings at a layer or at its parameters, including those that another finding explains."""
        return [found for found in self._found() if found.site == layer or found.site.startswith(f"{layer}.")]

    def cause_of(self, finding: Finding) -> Finding | None:
        """The finding that explains this one, if there is one."""
        return next((found for found in self.run.findings if finding in found.affected), None)

    def _found(self) -> list[Finding]:
        """All findings, including those that others explain."""
        return [one for finding in self.run.findings for one in (finding, *finding.affected)]

    def quantiles(self, layer: str, port: str = "output") -> tuple[list[int], list[list[float]]]:
        """The steps with histograms, and the quantiles of a layer's values at each."""
        with self.lock:
            self._read_quantiles()
            found = {
                step: by_place[layer, port] for step, by_place in self._quantiles.items() if (layer, port) in by_place
            }
        return list(found), list(found.values())

    def _read_quantiles(self) -> None:
        for step in spread(self.run.steps_with(Histogram.name), _HISTOGRAMS):
            if step not in self._quantiles:
                rows = self.run.window(step).rows.items()
                states = {place: row.states[Histogram.name][0]() for place, row in rows if Histogram.name in row.states}
                self._quantiles[step] = {place: _quantiles(state) for place, state in states.items()}


def worst_in(path: str, health: Mapping[str, Severity]) -> str:
    """The worst severity found at a module and inside it; empty if there is none.

    >>> worst_in("a", {"a.b": Severity.INFO, "a": Severity.ERROR, "ab": Severity.WARNING})
    'error'
    """
    found = [severity for site, severity in health.items() if site == path or site.startswith(f"{path}.")]
    return str(max(found, key=lambda severity: severity.rank)) if found else ""


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _new_edition() -> int:
    """A number that no other reader has, not even in another process: a page may outlive its server."""
    return secrets.randbits(48)


def _quantiles(state: Tensor) -> list[float]:
    bins: Bins = Histogram().compute(state)
    return [bins.quantile(q) for q in QUANTILES]


def _drawn(value: float) -> float | None:
    """A number as it is sent to the page: None instead of NaN, and four digits, since more would not be visible."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
