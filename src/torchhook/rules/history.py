"""What rules read: statistics by step, and facts about the model, the task and the optimizer, as plain data."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchhook.core.findings import Finding
from torchhook.rules.entry import Entry
from torchhook.rules.kinds import kind_of
from torchhook.rules.loop import Loop
from torchhook.rules.loss_graph import LossTerm, merged
from torchhook.rules.ranks import RankStep
from torchhook.stats.downsample import thinned
from torchhook.stats.moments import Summary
from torchhook.stats.reading import Place, Reading, Row, Snapshot
from torchhook.stats.stat import unlike

if TYPE_CHECKING:
    from torchhook.rules.profile import Profile
    from torchhook.rules.rest import Rest


GOOD = 0.45
"""A training works if its loss ends below this share of the loss of guessing."""

GREAT = 0.2
"""The same as a share of the first loss, if the loss of guessing is unknown."""


@dataclass(frozen=True)
class Task:
    """What the model is trained to do, as seen on one batch."""

    output_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    broadcast: bool = False  # whether the loss compares every output with every target


@dataclass(frozen=True)
class Modes:
    """Statistics of the same batches in train and in eval mode; those in train mode also batch by batch."""

    train: Snapshot
    batches: tuple[Snapshot, ...]
    eval: Snapshot
    train_loss: float
    eval_loss: float
    dropping: Mapping[str, str] = field(default_factory=dict)  # active dropouts in eval mode: line → path of the module


@dataclass(frozen=True)
class Raised:
    """An exception of the user's code in the middle of an inspection."""

    kind: str
    message: str
    line: str  # the innermost one outside of torch and torchhook
    step: int

    @staticmethod
    def of(error: Exception, step: int) -> Raised:
        """The exception as plain data."""
        at = own_frame(error)
        line = "" if at is None else f"{Path(at.filename).name}:{at.lineno}: {at.line}".removesuffix(": ")
        return Raised(type(error).__name__, str(error), line, step)


@dataclass
class History:
    """What was measured of a model, window by window, and facts about it; facts that were not looked at are None."""

    windows: list[Entry] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)  # the largest learning rate, by step
    rest: Rest | None = None  # before the first step
    after: Rest | None = None  # after the last one
    task: Task | None = None
    terms: dict[int, Sequence[LossTerm]] = field(default_factory=dict)  # what the loss compares, in some steps
    modes: Modes | None = None
    loop: Loop | None = None
    ranks: list[RankStep] = field(default_factory=list)  # what each of several ranks saw
    profile: Profile | None = None
    first_step: int = 0
    own_optimizer: bool = False  # whether the user passed one
    origin: Finding | None = None  # of the first nonfinite value, if its origin was searched for
    raised: Raised | None = None  # what the user's code raised, which ended the inspection
    scaled: bool = False  # whether a GradScaler is searching for its scale
    unlisted: int = 0  # parameters that the output depends on, but that neither the model nor the optimizer has
    effects: dict[str, bool] = field(default_factory=dict)  # of parameters without a gradient: does the loss need them?
    _tables: dict[Any, Any] = field(default_factory=dict, repr=False)  # results to reuse until the next window
    _moments: dict[int, dict[Place, Summary]] = field(default_factory=dict, repr=False)  # by step, already computed

    def add(self, step: int, snapshot: Snapshot, loss: float | None = None) -> None:
        """Add a window that has ended."""
        self.windows.append(Entry(step, time.time(), snapshot))
        if loss is not None:
            self.losses[step] = loss
        self._moments.pop(step, None)
        self._tables.clear()

    def thin(self, most: int, keep: Collection[int] = ()) -> None:
        """If there are more than `most` windows, drop half of the older ones, but none of `keep`.

        >>> history = History()
        >>> for step in range(9):
        ...     history.add(step, Snapshot({}))
        >>> history.thin(8, keep=[3])
        >>> [window.step for window in history.windows]
        [0, 2, 3, 4, 6, 7, 8]
        """
        if len(self.windows) > most:
            steps = [window.step for window in self.windows]
            gone = set(thinned(steps, keep))
            self.windows = [window for window in self.windows if window.step not in gone]
            self._moments = {step: known for step, known in self._moments.items() if step not in gone}
            self.ranks = [known for known in self.ranks if known.step not in gone]
            self._tables.clear()
        for step in thinned(list(self.terms), keep) if len(self.terms) > most else ():
            del self.terms[step]
        for by_step in (self.losses, self.rates):
            if len(by_step) > 100 * most:
                for step in thinned(list(by_step), {*keep, *(window.step for window in self.windows)}):
                    del by_step[step]

    def drop(self, stat: str, most: int) -> None:
        """Drop the states of a large statistic, except in the last `most` windows that have it."""
        for number in range(len(self.windows) - 1, -1, -1):
            rows = self.windows[number].snapshot.rows
            places = {place for place, row in rows.items() if stat in row.states}
            if not places and number == len(self.windows) - 1:  # then nothing new is left to drop
                return
            most -= bool(places)
            if places and most < 0:
                kept = {place: _without(row, stat) if place in places else row for place, row in rows.items()}
                self.windows[number] = replace(self.windows[number], snapshot=Snapshot(kept))

    @property
    def comparisons(self) -> list[LossTerm]:
        """What the loss compares, each over all steps in which it was looked at."""
        return merged(self.terms.values())

    @property
    def classes(self) -> int:
        """The number of classes, if the loss is one cross entropy; else 0."""
        known = {term.classes for terms in self.terms.values() for term in terms if term.kind == "cross-entropy"}
        return known.pop() if len(known) == 1 and len(self.comparisons) == 1 else 0

    @property
    def chance(self) -> float:
        """The loss of the best constant prediction, by the targets; NaN if it is unknown."""
        known = [term.chance for term in self.comparisons]
        return known[0] if len(known) == 1 else math.nan

    @property
    def has_one_answer(self) -> bool:
        """Whether all targets are the same, so that a constant output is right."""
        targets = [term.target for term in self.comparisons]
        return bool(targets) and all(target is not None and not target.std for target in targets)

    @property
    def works(self) -> bool:
        """Whether the training has got well below what guessing gives: the loss, over its last quarter of steps."""
        values = list(self.losses.values())
        late = values[-max(1, len(values) // 4) :]
        is_known = not math.isnan(self.chance)
        return bool(late) and fmean(late) < (GOOD * self.chance if is_known else GREAT * values[0])

    @property
    def is_contest(self) -> bool:
        """Whether others are trained in turn, on losses of their own, so that no loss has to fall."""
        return self.loop is not None and 2 * self.loop.rivals > self.loop.steps

    def has(self, port: str, stat: str) -> bool:
        """Whether a statistic was measured at a port, at any place."""
        return any(
            _port(place) == port and any(known.name == stat for known in row.stats)
            for place, row in self._places.items()
        )

    def whole(self, part: float = 1.0) -> Snapshot:
        """The last `part` of the windows, merged; for each statistic, of the windows in which it was measured.

        At least one window counts: ``whole(0)`` has the last one of each statistic.
        """
        if part not in self._tables:
            self._tables[part] = Snapshot({place: _late_part(row, part) for place, row in self._places.items()})
        found: Snapshot = self._tables[part]
        return found

    def before(self, part: float) -> Snapshot:
        """The windows before those of ``whole(part)``, merged."""
        return Snapshot({place: _early_part(row, part) for place, row in self._places.items()})

    @property
    def _places(self) -> dict[Place, Row]:
        """The rows of all windows by place: each statistic has one state per window in which it was measured."""
        if "places" not in self._tables:
            rows: dict[Place, list[Row]] = {}
            for _, snapshot in self.windows:
                for place, row in snapshot.rows.items():
                    rows.setdefault(place, []).append(row)
            self._tables["places"] = {place: _state_per_window(found) for place, found in rows.items()}
        found: dict[Place, Row] = self._tables["places"]
        return found

    def first(self) -> Snapshot:
        """The first window."""
        return self.windows[0].snapshot if self.windows else Snapshot({})

    def summaries(self, port: str) -> dict[Place, dict[int, Summary]]:
        """The moments at a port, by place and step; places in the order of execution."""
        if port not in self._tables:
            table: dict[Place, dict[int, Summary]] = {place: {} for place in self.whole().rows if _port(place) == port}
            for step, snapshot in self.windows:
                known = self._moments.setdefault(step, {})
                for place, row in snapshot.rows.items():
                    if place not in table:
                        continue
                    if place not in known and "moments" in row.states:
                        known[place] = Reading(place, row)["moments"]
                    if place in known:
                        table[place][step] = known[place]
            self._tables[port] = {place: found for place, found in table.items() if found}
        found: dict[Place, dict[int, Summary]] = self._tables[port]
        return found

    @property
    def order(self) -> dict[str, int]:
        """The position of each path in the order of execution; a parameter has that of its module."""
        if "order" not in self._tables:
            paths = dict.fromkeys(path for path, _ in self.whole().rows)
            modules = {path: number for number, path in enumerate(_modules_of(self.whole()))}
            self._tables["order"] = {path: modules.get(path, modules.get(owner(path), len(modules))) for path in paths}
        found: dict[str, int] = self._tables["order"]
        return found


def readings(snapshot: Snapshot, port: str, stat: str, *kinds: str) -> Iterator[Reading]:
    """The readings of a statistic at a port of modules of these kinds (none: all), in the order of execution."""
    for place, row in snapshot.rows.items():
        if _port(place) == port and (not kinds or kind_of(row.label) in kinds):
            reading = snapshot[place]
            if stat in reading:
                yield reading


def last_of(history: History, *kinds: str) -> str:
    """The path of the last leaf of these kinds that ran; empty if there is none."""
    found = [reading.path for reading in readings(history.whole(), "output", "moments", *kinds)]
    return found[-1] if found else ""


def joined(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Several snapshots as one; states at the same place are merged when they are read."""
    rows: dict[Place, Row] = {}
    for snapshot in snapshots:
        for place, row in snapshot.rows.items():
            rows[place] = _concatenated(rows[place], row) if place in rows else row
    return Snapshot(rows)


def settled(snapshot: Snapshot) -> Snapshot:
    """The snapshot with one state per statistic, which is merged once, when it is first read."""
    return Snapshot({place: _with_merged_states(row) for place, row in snapshot.rows.items()})


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost line that an exception went through which is neither torch's nor torchhook's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not {"torch", "torchhook"} & set(Path(frame.filename).parts)]
    return own[-1] if own else None


def samples(reading: Reading) -> int:
    """How many values of each unit `Channels` has seen."""
    return int(reading.state("channels")[0].max())


def owner(path: str) -> str:
    """The module that a parameter belongs to.

    >>> owner("layer1.0.weight")
    'layer1.0'
    """
    return path.rpartition(".")[0]


def is_within(path: str, part: str) -> bool:
    """Whether a path is that of a module, or of something inside it.

    >>> is_within("layer1.0", "layer1"), is_within("layer10", "layer1")
    (True, False)
    """
    return path == part or not part or path.startswith(f"{part}.")


def finite(values: Iterable[float]) -> list[float]:
    """The values that are finite."""
    return [value for value in values if math.isfinite(value)]


def norm(summary: Summary) -> float:
    """The norm of all values; infinite if one of them is not finite."""
    return math.inf if summary.nonfinite else summary.l2


def rms(summary: Summary) -> float:
    """The root mean square of all values; infinite if one of them is not finite."""
    return norm(summary) / math.sqrt(max(summary.count, 1))


def mean_unit_std(reading: Reading) -> float | None:
    """The standard deviation of each unit over the samples, averaged over the units; None if it was not measured."""
    known = finite(reading["channels"].std.tolist()) if "channels" in reading else []
    return sum(known) / len(known) if known else None


def percent(share: float) -> str:
    """A share in percent, with few digits.

    >>> percent(3.411), percent(0.00012), percent(0.5)
    ('341', '0.012', '50')
    """
    return f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2g}"


def plain(value: float | Tensor) -> float:
    """A number rounded to four digits."""
    return float(f"{float(value):.4g}")


def _port(place: Place) -> str:
    return place[1].partition("[")[0]


def _modules_of(snapshot: Snapshot) -> dict[str, None]:
    return dict.fromkeys(path for (path, _), row in snapshot.rows.items() if row.label)


def _concatenated(a: Row, b: Row) -> Row:
    """Two rows of the same place as one, with the states of both."""
    stats = {stat.name: stat for stat in (*a.stats, *b.stats)}
    states = {key: [*a.states.get(key, ()), *b.states.get(key, ())] for key in {**a.states, **b.states}}
    return a._replace(stats=tuple(stats.values()), states=states, failed={**a.failed, **b.failed})


def _state_per_window(rows: list[Row]) -> Row:
    """The rows of a place, one per window, as one row with one state per window.

    Statistics whose number of units changed between the windows are left out.
    """
    failed = {name: reason for row in rows for name, reason in row.failed.items()}
    known = [stat for row in rows for stat in row.stats if not unlike(failed.get(stat.name, ""))]
    stats = {stat.key: stat for stat in known}  # statistics with the same key share a state
    states: dict[str, list[Callable[[], Tensor]]] = {
        key: [MergedState(stat, row.states[key]) for row in rows if row.states.get(key)] for key, stat in stats.items()
    }
    named = {stat.name: stat for stat in known}
    return rows[0]._replace(stats=tuple(named.values()), states=states, failed=failed)


def _without(row: Row, stat: str) -> Row:
    states = {key: found for key, found in row.states.items() if key != stat}
    return row._replace(stats=tuple(known for known in row.stats if known.key != stat), states=states)


def _late_part(row: Row, part: float) -> Row:
    """The row with the last `part` of the states of each statistic, at least one, merged."""
    late = {key: states[_cut(states, part) :] for key, states in row.states.items()}
    return _with_merged_states(row._replace(states=late))


def _early_part(row: Row, part: float) -> Row:
    """The row with the states before those of `_late_part`, merged."""
    early = {key: states[: _cut(states, part)] for key, states in row.states.items()}
    return _with_merged_states(row._replace(states=early))


def _cut(states: Sequence[Any], part: float) -> int:
    """The index of the first state that belongs to the last `part`."""
    return min(math.floor(len(states) * (1 - part)), len(states) - 1) if states else 0


def _with_merged_states(row: Row) -> Row:
    """The row with one state per statistic, without statistics that have none."""
    if all(len(row.states.get(stat.key, ())) == 1 for stat in row.stats):
        return row
    by_key = {stat.key: stat for stat in row.stats}
    states: dict[str, list[Callable[[], Tensor]]]
    states = {key: [MergedState(stat, row.states[key])] for key, stat in by_key.items() if row.states.get(key)}
    return row._replace(stats=tuple(stat for stat in row.stats if stat.key in states), states=states)


class MergedState:
    """Several states merged into one, when it is first read."""

    __slots__ = ("parts", "stat", "state")

    def __init__(self, stat: Any, parts: list[Callable[[], Tensor]]) -> None:
        self.stat = stat
        self.parts = parts
        self.state: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.state is None:
            states = [read() for read in self.parts]
            self.state = states[0] if len(states) == 1 else self.stat.merge(torch.stack(states))
            self.parts = []
        return self.state
