"""The data behind the pages, kept in memory: only new steps are read, and not more than a screen can show."""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchhook.core.findings import Finding, Severity
from torchhook.stats import Channels, Histogram
from torchhook.stats.channels import Units
from torchhook.stats.downsample import spread, thinned
from torchhook.stats.histogram import Bins
from torchhook.training.runs import Run
from torchhook.training.runs.queries import Series
from torchhook.training.runs.schema import FILE

WIDE = 240  # steps to draw; beyond twice as many, older ones are thinned out
LOSSES = 2000
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_UNITS = 8  # steps of which the units are read
_HISTOGRAMS = 32  # steps of which the histograms are read


class Sheet:
    """A `Series` of a run that grows with it, and is thinned out when it is wider than a screen.

    As long as the `edition` stays the same, a page that has drawn some steps only needs to append the new ones.
    """

    def __init__(self, run: Run, field: str, port: str) -> None:
        self.run = run
        self.field = field
        self.port = port
        self.edition = _new_edition()
        self.series = Series([], [], torch.zeros(0, 0, dtype=torch.float64))

    @property
    def steps(self) -> list[int]:
        """The steps that are drawn."""
        return self.series.steps

    @property
    def paths(self) -> list[str]:
        """The layers, in execution order."""
        return self.series.paths

    @property
    def rows(self) -> list[list[float | None]]:
        """The values as they are drawn, one row per step."""
        return self.rows_from(0)

    def refresh(self) -> None:
        """Read new steps."""
        known = self.series
        late = self.run.series(self.field, self.port, WIDE, after=known.steps[-1] if known.steps else None)
        if late.paths == known.paths:
            late = Series([*known.steps, *late.steps], known.paths, torch.cat([known.values, late.values], 1))
        else:
            self.edition = _new_edition()
            if known.steps:  # there are new layers
                late = self.run.series(self.field, self.port, WIDE)
        if len(late.steps) > 2 * WIDE:
            gone = set(thinned(late.steps))
            kept = [number for number, step in enumerate(late.steps) if step not in gone]
            late = Series([late.steps[number] for number in kept], late.paths, late.values[:, kept])
            self.edition = _new_edition()
        self.series = late

    def rows_from(self, first: int) -> list[list[float | None]]:
        """The rows from the one at position `first` on."""
        return _rows(self.series.values.T[first:])

    def row(self, number: int) -> list[float | None]:
        """The row at position `number`; empty if there are no steps."""
        return _rows(self.series.values[:, [number]].T)[0] if self.steps else []

    def line(self, path: str) -> list[float | None]:
        """The values of one layer, by step; empty if there is no such layer."""
        return _rows(self.series.values[[self.paths.index(path)]])[0] if path in self.paths else []


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
        some = list(dict.fromkeys([*spread(list(late), LOSSES), *list(late)[-1:]]))  # the newest is always drawn
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
        self._units: dict[tuple[str, int], list[Units]] = {}
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
        return [len(steps), steps[-1] if steps else None, len(self.layers()), len(self.run.findings), self.run.state]

    def health(self) -> dict[str, Severity]:
        """The worst severity found at each site."""
        worst: dict[str, Severity] = {}
        for found in self.found():
            worst[found.site] = max(worst.get(found.site, found.severity), found.severity, key=lambda one: one.rank)
        return worst

    def findings_at(self, layer: str) -> list[Finding]:
        """The findings at a layer or at its parameters, including those that another finding explains."""
        return [found for found in self.found() if found.site == layer or found.site.startswith(f"{layer}.")]

    def cause_of(self, finding: Finding) -> Finding | None:
        """The finding that explains this one, if there is one."""
        return next((found for found in self.run.findings if finding in found.affected), None)

    def found(self) -> list[Finding]:
        """All findings, including those that others explain."""
        return [one for finding in self.run.findings for one in (finding, *finding.affected)]

    def faulty_step(self) -> int | None:
        """The step of the worst finding, the first of several, including findings that another one explains."""
        found = [finding for finding in self.found() if finding.step is not None and finding.severity > "info"]
        return min(found, key=lambda finding: (-finding.severity.rank, finding.step)).step if found else None

    def quantiles(self, layer: str, port: str = "output") -> tuple[list[int], list[list[float]]]:
        """The steps with histograms, and the quantiles of a layer's values at each."""
        with self.lock:
            self._read_quantiles()
            found = {
                step: by_place[layer, port] for step, by_place in self._quantiles.items() if (layer, port) in by_place
            }
        return list(found), list(found.values())

    def rows(self, sheet: Sheet, first: int = 0, last: int | None = None) -> list[list[float | None]]:
        """The rows of a sheet from position `first` to before `last`, with NaN where some values were not finite."""
        rows = _rows(sheet.series.values.T[first:last])
        places = {step: number for number, step in enumerate(sheet.steps[first:last])}
        counts = self.sheet("nonfinite", sheet.port)
        for path, column in (counts.series.values > 0).nonzero().tolist():
            row = places.get(counts.steps[column])
            if row is not None and path < len(rows[row]):
                rows[row][path] = math.nan
        return rows

    def line(self, field: str, port: str, path: str) -> tuple[list[int], list[float | None]]:
        """The steps, and a statistic of one layer at each, with NaN where some values were not finite."""
        sheet, counts = self.sheet(field, port), self.sheet("nonfinite", port)
        broken = {step for step, count in zip(counts.steps, counts.line(path), strict=False) if count}
        values = zip(sheet.steps, sheet.line(path), strict=False)
        return sheet.steps, [math.nan if step in broken else value for step, value in values]

    def units(self, layer: str) -> dict[int, Units]:
        """The statistics of a layer's units, at some of the steps at which they were measured."""
        with self.lock:
            steps = spread(self.run.steps_with(Channels.name), _UNITS)
            for step in steps:
                if (layer, step) not in self._units:
                    row = self.run.window(step).rows.get((layer, "output"))
                    states = row.states.get(Channels.name, ()) if row else ()
                    self._units[layer, step] = [Channels().compute(state()) for state in states]
            return {step: found[0] for step in steps if (found := self._units[layer, step])}

    def _read_quantiles(self) -> None:
        """Read the steps that are shown; others, from before the run was longer, are forgotten."""
        steps = spread(self.run.steps_with(Histogram.name), _HISTOGRAMS)
        self._quantiles = {step: self._quantiles.get(step) or self._quantiles_at(step) for step in steps}

    def _quantiles_at(self, step: int) -> dict[tuple[str, str], list[float]]:
        rows = self.run.window(step).rows.items()
        states = {place: row.states[Histogram.name][0]() for place, row in rows if Histogram.name in row.states}
        return {place: _quantiles(state) for place, state in states.items()}


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


def _rows(values: Tensor) -> list[list[float | None]]:
    return [[_drawn(value) for value in row] for row in values.tolist()]
