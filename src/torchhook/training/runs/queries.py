"""What is read from a run, each a function of an open connection: places, entries, groups, series."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.core.untrusted import json_of
from torchhook.rules.entry import Entry
from torchhook.stats.downsample import spread
from torchhook.stats.moments import Moments
from torchhook.stats.reading import Place, Row, Snapshot
from torchhook.training.runs.blobs import unpacked
from torchhook.training.runs.fields import WIDTH, field_of
from torchhook.training.runs.groups import Group, row_of
from torchhook.training.runs.schema import UNWRITTEN
from torchhook.training.runs.tables import BYTES, MAYBE_NUMBER, NUMBER, TEXT, WHOLE, moment, rows

AT_ONCE = 128  # steps that are unpacked together
_LAST = 2**63 - 1  # the largest step that SQLite can store
_DEEPEST, _LONGEST = 300, 10_000  # levels and characters of a path: Python itself calls no model that is deeper
_STORED = ("running", "ended", "failed", "interrupted", UNWRITTEN)  # states of a run
_STATES = "states CROSS JOIN layouts ON layouts.id = states.layout"  # in this order: there may be many layouts


class Series(NamedTuple):
    """One number by path and step: `values` are paths × steps, NaN where nothing was measured."""

    steps: list[int]
    paths: list[str]
    values: Tensor


class Life(NamedTuple):
    """When a run began and ended, in seconds since 1970, the state that it was last in, and the process that writes."""

    state: str
    started: float
    ended: float | None
    owner: Mapping[str, Any]


def life(db: sqlite3.Connection) -> Life:
    """The life of the run."""
    query = "SELECT state, started, ended, owner FROM life"
    ((state, started, ended, owner),) = rows(db, query, (TEXT, NUMBER, MAYBE_NUMBER, TEXT))
    if state not in _STORED:
        raise ValueError(f"{state!r:.80} is not a state")
    return Life(state, moment(started), None if ended is None else moment(ended), {**json_of(owner)})


def told(db: sqlite3.Connection, key: str, default: Any) -> Any:
    """A fact about the whole run, or the default."""
    found = rows(db, "SELECT value FROM about WHERE key = ?", (TEXT,), (key,))
    return next((json_of(value) for (value,) in found), default)


def places(db: sqlite3.Connection) -> dict[int, tuple[Place, Row]]:
    """Every place by its id, with a row that has no states."""
    query = "SELECT id, path, port, label, note, stats, failed FROM places ORDER BY id"
    found = rows(db, query, (WHOLE, *6 * (TEXT,)))
    return {id_: ((_path(path), port), row_of(*facts)) for id_, path, port, *facts in found}


def steps(db: sqlite3.Connection) -> list[int]:
    """The measured steps."""
    return [step for (step,) in rows(db, "SELECT step FROM windows ORDER BY step", (WHOLE,))]


def steps_with(db: sqlite3.Connection, stat: str) -> list[int]:
    """The measured steps in which a statistic was collected."""
    layouts = "SELECT id FROM layouts WHERE stat = ?"
    query = f"SELECT DISTINCT step FROM states WHERE layout IN ({layouts}) ORDER BY step"
    return [step for (step,) in rows(db, query, (WHOLE,), (stat,))]


def losses(db: sqlite3.Connection, after: int = -_LAST, until: int = _LAST) -> dict[int, float]:
    """The losses of the steps after `after`, up to `until`."""
    query = "SELECT step, loss FROM losses WHERE step > ? AND step <= ? ORDER BY step"
    return {step: number(loss) for step, loss in rows(db, query, (WHOLE, MAYBE_NUMBER), (after, until))}


def loss_curve(db: sqlite3.Connection, most: int) -> dict[int, float]:
    """At most `most` of the losses, evenly spread. Each is looked up: of 200,000, reading all would take long.

    By its rowid, which is the step: that is quick also in the table of a stranger, which may have no index.
    """
    ends = "SELECT min(rowid), max(rowid) FROM losses HAVING count(*)"
    query = "SELECT step, loss FROM losses WHERE rowid >= ? ORDER BY rowid LIMIT 1"
    found: dict[int, float] = {}
    for first, last in rows(db, ends, (WHOLE, WHOLE)):
        for part in range(most):
            at = first + (last - first) * part // (most - 1)
            found.update((step, number(loss)) for step, loss in rows(db, query, (WHOLE, MAYBE_NUMBER), (at,)))
    return found


def chosen(steps: Sequence[int], most: int | None) -> list[int]:
    """At most `most` of the steps, evenly spread, including the first and the last."""
    if most is not None and most < 2:
        raise ValueError(f"most must be at least 2, or None for all, not {most!r}")
    if most is None or len(steps) <= most:
        return list(steps)
    return [*spread(steps[:-1], most - 1), steps[-1]]


def entry(db: sqlite3.Connection, step: int) -> Entry | None:
    """A measured step, without feature maps and wires; None if it was not measured."""
    query = "SELECT time, rate FROM windows WHERE step = ?"
    found = next(rows(db, query, (NUMBER, MAYBE_NUMBER), (step,)), None)
    if found is None:
        return None
    time, rate = found
    ((previous,),) = rows(db, "SELECT ifnull(max(step), -1) FROM windows WHERE step < ?", (WHOLE,), (step,))
    here = losses(db, previous, step)
    return Entry(step, time, _snapshot(db, step), here, rate, rates={} if rate is None else {step: rate})


def number(value: float | None) -> float:
    """A number from a table, where SQLite stores NaN as NULL."""
    return math.nan if value is None else value


def _snapshot(db: sqlite3.Connection, step: int) -> Snapshot:
    states: dict[int, dict[str, list[Callable[[], Tensor]]]] = {}
    query = f"SELECT stat, shape, places, data FROM {_STATES} WHERE step = ?"
    for stat, shape, ids, data in rows(db, query, (TEXT, TEXT, TEXT, BYTES), (step,)):
        numbers = json.loads(ids)
        found = unpacked([data], len(numbers), json.loads(shape))[0]
        for position, number in enumerate(numbers):
            states.setdefault(number, {})[stat] = [partial(_nth, found, position)]
    known = places(db)
    return Snapshot({known[number][0]: _filled(known[number][1], states[number]) for number in sorted(states)})


def groups(db: sqlite3.Connection, steps: Iterable[int], stat: str, port: str | None = None) -> list[Group]:
    """The states of a statistic in some steps, at one port or all: one group per set of places."""
    names = {number: place for number, (place, _) in places(db).items()}
    together: dict[int, dict[int, bytes]] = {}  # by layout and step
    query = f"SELECT layout, data FROM {_STATES} WHERE step = ? AND stat = ? AND port = ifnull(?, port)"
    for step in steps:
        for layout, data in rows(db, query, (WHOLE, BYTES), (step, stat, port)):
            together.setdefault(layout, {})[step] = data
    found = []
    for layout, blobs in together.items():
        layouts = "SELECT port, shape, places FROM layouts WHERE id = ?"
        ((at, *facts),) = rows(db, layouts, (TEXT, TEXT, TEXT), (layout,))
        shape, ids = map(json.loads, facts)
        states = unpacked(list(blobs.values()), len(ids), shape)
        found.append(Group(stat, at, [names[number] for number in ids], list(blobs), states))
    return found


def series(db: sqlite3.Connection, field: str, port: str, most: int | None, after: int | None = None) -> Series:
    """A field of the moments at a port, by path and step."""
    wanted = _at_port((place for place, _ in places(db).values()), port)
    taken = chosen([step for step in steps(db) if after is None or step > after], most)
    row_at = {place: number for number, place in enumerate(wanted)}
    columns = {step: number for number, step in enumerate(taken)}
    values = torch.full((len(row_at), len(columns)), math.nan, dtype=torch.float64)
    for first in range(0, len(taken), AT_ONCE):
        for group in groups(db, taken[first : first + AT_ONCE], Moments.name, port):
            here = [number for number, place in enumerate(group.places) if place in row_at]
            if here and group.states.shape[2:] == (WIDTH,):
                row = torch.tensor([row_at[group.places[number]] for number in here])
                column = torch.tensor([columns[step] for step in group.steps])
                values[row[:, None], column] = field_of(group.states[:, here], field).T
    return Series(taken, [path for path, _ in wanted], values)


def _path(path: str) -> str:
    """The path of a module, if a model can have it; a page would draw thousands of levels until memory ends."""
    if path.count(".") > _DEEPEST or len(path) > _LONGEST:
        raise ValueError(f"a path of {len(path):,} characters and {path.count('.') + 1:,} levels")
    return path


def _filled(row: Row, states: dict[str, list[Callable[[], Tensor]]]) -> Row:
    """A row with its states, as far as their statistics are known."""
    stats = tuple(stat for stat in row.stats if stat.key in states)
    return row._replace(stats=stats, states={stat.key: states[stat.key] for stat in stats})


def _at_port(places: Iterable[Place], port: str) -> list[Place]:
    """One place per path: the value at the port, or the first tensor in it."""
    found: dict[str, Place] = {}
    for path, known in places:
        if known == port or (known.startswith(f"{port}[") and path not in found):
            found[path] = path, known
    return list(found.values())


def _nth(states: Tensor, number: int) -> Tensor:
    return states[number]
