"""What was measured, as plain data: a `Snapshot` maps places to `Reading`s."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.core.errors import NotRecordedError
from torchhook.core.selection import nearest
from torchhook.core.tabular import Tabular, short
from torchhook.stats.channels import Channels, Units
from torchhook.stats.histogram import Bins, Histogram
from torchhook.stats.moments import Moments, Summary
from torchhook.stats.stat import Stat, unlike

FLAGS = {
    "output": "outputs",
    "input": "inputs",
    "grad_output": "grads",
    "param": "params",
    "param_grad": "param_grads",
    "param_grad_norm": "param_grads",
    "step_grad": "param_grads",
    "step_grad_norm": "param_grads",
    "param_norm": "updates",
    "update": "updates",
    "update_norm": "updates",
    "update_ratio": "updates",
}
"""The argument of `measure` that measures a port."""


Place = tuple[str, str]
"""A path and a port. For a value that is not a single tensor, the port ends with the address of one, as in ``[0]``."""


class Row(NamedTuple):
    """One place of a snapshot: its statistics, the class of its module, what exactly is measured, readers of the states
    by key, why statistics were dropped, and the shape of the latest value."""

    stats: tuple[Stat, ...]
    label: str
    note: str
    states: dict[str, list[Callable[[], Tensor]]]
    failed: dict[str, str] = {}  # noqa: RUF012 (never written to)
    shape: tuple[int, ...] | None = None


class Reading(Mapping[str, Any]):
    """The statistics of one place. The attributes are those of `Moments`; ``reading[name]`` gives any other.

    >>> from torchhook import Reduce, Site
    >>> reduce = Reduce("moments", "quantiles")
    >>> reduce.cell(Site("fc"), None).update(torch.tensor([1.0, 2.0, 3.0]))
    >>> reading = reduce.snapshot()["fc"]
    >>> reading.mean, reading.std, reading.nonfinite
    (2.0, 1.0, 0)
    """

    def __init__(self, place: Place, row: Row) -> None:
        self.path, self.port = place
        self.note = row.note
        self.module_class = row.label
        self._row = row
        self._stats = {stat.name: stat for stat in row.stats}

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of the latest value; None if it is unknown, as in a run on disk."""
        return self._row.shape

    @property
    def count(self) -> int:
        """The number of values, finite or not."""
        return self._moments.count

    @property
    def mean(self) -> float:
        """The mean of the finite values."""
        return self._moments.mean

    @property
    def std(self) -> float:
        """The standard deviation of the finite values, unbiased as torch's."""
        return self._moments.std

    @property
    def min(self) -> float:
        """The smallest finite value."""
        return self._moments.min

    @property
    def max(self) -> float:
        """The largest finite value."""
        return self._moments.max

    @property
    def l2(self) -> float:
        """The L2 norm of all finite values together."""
        return self._moments.l2

    @property
    def abs_mean(self) -> float:
        """The mean of the absolute finite values."""
        return self._moments.abs_mean

    @property
    def zero_fraction(self) -> float:
        """The fraction of all values that is exactly zero."""
        return self._moments.zero_fraction

    @property
    def nonfinite(self) -> int:
        """The number of values that are NaN or infinite."""
        return self._moments.nonfinite

    @property
    def channels(self) -> Units:
        """Mean, standard deviation, mean absolute value and active fraction of each unit."""
        units: Units = self[Channels.name]
        return units

    def histogram(self) -> Bins:
        """Edges and counts. The edges are the same for every step, rank and run."""
        if Histogram.name not in self._row.states:
            raise self._not_recorded(Histogram.name)
        return Histogram().compute(self.state(Histogram.name))

    def quantile(self, q: float) -> float:
        """The value below which a fraction `q` of the values is; off by less than a quarter of it, usually far less."""
        found = self.histogram().quantile(q)
        return max(self.min, min(self.max, found)) if Moments.name in self._stats else found

    def states(self) -> dict[str, Tensor]:
        """The states behind the statistics, by key."""
        return {key: self.state(key) for key in self._row.states}

    def state(self, key: str) -> Tensor:
        """The state behind a statistic, as one tensor."""
        states = [read() for read in self._row.states[key]]
        stat = next(stat for stat in self._row.stats if stat.key == key)
        return states[0] if len(states) == 1 else stat.merge(torch.stack(states))

    def __getitem__(self, name: str) -> Any:
        if name not in self._stats:
            raise self._not_recorded(name)
        return self._stats[name].compute(self.state(self._stats[name].key))

    def __contains__(self, name: object) -> bool:
        return name in self._stats  # without computing it

    def __iter__(self) -> Iterator[str]:
        return iter(self._stats)

    def __len__(self) -> int:
        return len(self._stats)

    def __getstate__(self) -> dict[str, Any]:
        states: dict[str, list[Callable[[], Tensor]]]
        states = {key: [partial(kept, state)] for key, state in self.states().items()}
        return {**vars(self), "_row": self._row._replace(states=states)}

    def __repr__(self) -> str:
        if "moments" not in self._stats:
            return f"Reading({self._where()}: {', '.join(self._stats)})"
        said = self._moments
        rest = f", {said.nonfinite:,} not finite" if said.nonfinite else ""
        return (
            f"Reading({self._where()}: {said.count:,} values, mean {said.mean:.4g}, std {said.std:.4g},"
            f" in [{said.min:.4g}, {said.max:.4g}], {said.zero_fraction:.1%} zero{rest})"
        )

    @property
    def _moments(self) -> Summary:
        summary: Summary = self[Moments.name]
        return summary

    def _where(self) -> str:
        return f"the {self.port} of {self.path!r}"

    def _not_recorded(self, name: str) -> NotRecordedError:
        if name in self._row.failed:
            reason = self._row.failed[name]
            return NotRecordedError(f"{name!r} of {self._where()}: {unlike(reason) or f'it raised {reason}'}")
        collected = ", ".join(map(repr, (*self._stats, name)))
        return NotRecordedError(
            f"{name!r} was not collected for {self._where()}; add it: measure(..., stats=({collected}))"
        )


class Snapshot(Tabular, Mapping[Any, Reading]):
    """What was measured until some moment: ``snapshot[path]`` reads an output, ``snapshot[path, port]`` any port.

    Iterating gives the places: modules in execution order, then parameters.
    """

    def __init__(
        self, rows: dict[Place, Row], aliases: Mapping[str, str] | None = None, stats: Sequence[Stat] = ()
    ) -> None:
        modules = {place: row for place, row in rows.items() if row.label}
        self.rows = modules | rows
        self.aliases = aliases or {}
        self.stats = tuple(stats)
        self.asked: frozenset[str] = frozenset()  # ports that are measured, even if nothing was seen there

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "rows": {place: Reading(place, row).__getstate__()["_row"] for place, row in self.rows.items()},
        }

    def __getitem__(self, place: str | Place) -> Reading:
        if not (isinstance(place, str) or (isinstance(place, tuple) and len(place) == 2)):
            raise TypeError(f"use stats[path] for an output, or stats[path, port]; not {place!r}")
        path, port = (place, "output") if isinstance(place, str) else place
        path = self.aliases.get(path, path)
        if (path, port) in self.rows:
            return Reading((path, port), self.rows[path, port])
        inside = [known for known in self.rows if known[0] == path and known[1].startswith(f"{port}[")]
        if not inside:
            raise NotRecordedError(f"nothing was measured at the {port} of {path!r}; {self._nearest(path, port)}")
        return Reading(inside[0], self.rows[inside[0]])

    def __iter__(self) -> Iterator[Place]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return super().__repr__() if self.rows else "nothing was measured yet"

    def _records(self) -> list[dict[str, Any]]:
        return [self._line(reading) for reading in map(self.__getitem__, self)]

    def _line(self, reading: Reading) -> dict[str, Any]:
        line: dict[str, Any] = {"path": reading.path, "module": reading.module_class, "port": reading.port}
        line["shape"] = reading.shape
        for name in reading:
            said = reading[name]
            line.update(_columns(name, said))
        return line

    def _printed(self) -> tuple[list[str], list[list[Any]]]:
        shown = ["count", "mean", "std", "min", "max", "zero_fraction", "nonfinite"]
        rows = []
        for line in self._records():
            numbers = [short(line.get(name, "")) for name in shown]
            rows.append([line["path"] or "''", line["module"], line["port"], *numbers])
        return ["site", "module", "port", *shown], rows

    def _nearest(self, path: str, port: str) -> str:
        flag = FLAGS.get(port.partition("[")[0])
        ports = [known for other, known in self.rows if other == path]
        if flag is None:
            return f"there is no such port; the ports are {', '.join(FLAGS)}"
        if not self.rows or port in self.asked:
            if not any(known == path for known, _ in self.rows):
                return f"nothing was seen there yet, or since the last reset(); {nearest(path, self._paths())}"
            return "nothing of it was seen yet, or since the last reset()"
        if not any(known == port for _, known in self.rows):
            return f"pass {flag}=True to measure it"
        return f"measured there: {', '.join(ports)}" if ports else nearest(path, self._paths())

    def _paths(self) -> set[str]:
        return {path for path, _ in self.rows}


def kept(state: Tensor) -> Tensor:
    """The reader of a state that has arrived already."""
    return state


def _columns(name: str, said: Any) -> dict[str, Any]:
    """What a table shows of one statistic: plain numbers."""
    if isinstance(said, Summary):
        return vars(said)
    if isinstance(said, Bins):
        return {"entropy": said.entropy, "normalised_entropy": said.normalised_entropy}
    return {name: said} if isinstance(said, (bool, int, float, str)) else {}
