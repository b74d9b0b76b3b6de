"""The data of plots by layer: the result of `measure`, a snapshot, or the latest window of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchhook.core.errors import NotRecordedError
from torchhook.stats.reading import FLAGS, Place, Reading, Row, Snapshot
from torchhook.stats.result import Stats
from torchhook.training.runs import Run


def snapshot_of(stats: Stats | Snapshot | Run, *ports: str, stat: str = "moments") -> Snapshot:
    """The snapshot to draw; of a run, the last window that has the statistic at one of the ports.

    >>> import torch
    >>> from torchhook import Reduce, Site
    >>> reduce = Reduce("moments")
    >>> reduce.cell(Site("fc"), torch.nn.Linear(1, 1)).update(torch.ones(3))
    >>> snapshot_of(reduce.snapshot(), "output")["fc"].mean
    1.0
    >>> snapshot_of(reduce.snapshot(), "grad_output")
    Traceback (most recent call last):
        ...
    torchhook.core.errors.NotRecordedError: nothing was measured at the port 'grad_output', only at output; \
call measure(..., grads=True)
    """
    if isinstance(stats, Run):
        rows = stats.places
        step = drawn_step(stats, *ports, stat=stat)
        found = Snapshot({}) if step is None else stats.window(step)
    else:
        found = _snapshot(stats)
        rows = found.rows
    if not paths_with(found.rows, *ports, stat=stat):
        raise NotRecordedError(_why(rows, ports[0], stat))
    return found


def drawn_step(run: Run, *ports: str, stat: str = "moments") -> int | None:
    """The last step of a run that has the statistic at one of the ports."""
    steps = reversed(run.steps_with(stat))
    return next((step for step in steps if paths_with(run.window(step).rows, *ports, stat=stat)), None)


def readings(stats: Stats | Snapshot | Run, port: str, stat: str = "moments") -> dict[str, Reading]:
    """The readings at a port, by path in execution order; the first tensor of a value with several."""
    snapshot = snapshot_of(stats, port, stat=stat)
    return {path: snapshot[path, port] for path in paths_with(snapshot.rows, port, stat=stat)}


def classes_of(stats: Stats | Snapshot | Run) -> dict[str, str]:
    """The class of each module that was measured, by path."""
    rows = stats.places if isinstance(stats, Run) else _snapshot(stats).rows
    return {path: row.label for (path, _), row in rows.items()}


def paths_with(rows: Mapping[Place, Row], *ports: str, stat: str) -> list[str]:
    """The paths that have a statistic at one of the ports."""
    found = (
        path
        for (path, port), row in rows.items()
        if _plain(port) in ports and any(stat in (known.name, known.key) for known in row.stats)
    )
    return list(dict.fromkeys(found))


def _snapshot(stats: Any) -> Snapshot:
    if isinstance(stats, Stats):
        return stats.snapshot()
    if not isinstance(stats, Snapshot):
        raise TypeError(f"stats must be the result of measure(), a Snapshot or a Run, not {stats!r:.80}")
    return stats


def _why(rows: Mapping[Place, Row], port: str, stat: str) -> str:
    """Why there is nothing to draw, and what to do."""
    ports = list(dict.fromkeys(_plain(known) for _, known in rows))
    if port in ports:
        return f"no {stat} was measured at the port {port!r}; call measure(..., stats=('moments', {stat!r}))"
    if port not in FLAGS:
        return f"there is no port {port!r}; the ports are {', '.join(FLAGS)}"
    only = f"only at {', '.join(ports)}" if ports else "or at any other"
    return f"nothing was measured at the port {port!r}, {only}; call measure(..., {FLAGS[port]}=True)"


def _plain(port: str) -> str:
    return port.partition("[")[0]
