"""`Run`: what a watched training wrote to disk, readable while it runs and afterwards."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from torchhook.core.cards import boxed, card, text
from torchhook.core.errors import NotRecordedError, RunError
from torchhook.core.findings import Finding, Report
from torchhook.core.text import in_units
from torchhook.core.untrusted import json_of
from torchhook.render.to_json import from_json
from torchhook.render.words import printable
from torchhook.rules.check import check
from torchhook.rules.entry import Entry
from torchhook.rules.history import History
from torchhook.rules.ranks import RankStep
from torchhook.stats.moments import Moments
from torchhook.stats.reading import Place, Row, Snapshot
from torchhook.training.runs import queries, ranks
from torchhook.training.runs.fields import require_field
from torchhook.training.runs.groups import Group
from torchhook.training.runs.location import Source, located
from torchhook.training.runs.owners import is_gone
from torchhook.training.runs.queries import AT_ONCE, Series, chosen, number
from torchhook.training.runs.schema import BESIDE, FILE, SAMPLES, UNWRITTEN
from torchhook.training.runs.tables import MAYBE_NUMBER, MAYBE_WHOLE, NUMBER, TEXT, WHOLE, moment, rows
from torchhook.training.runs.why import Why

_UNCHECKED = "the run has no report yet: nothing was checked so far"
_CHECKED_NOW = "the run has no report, so what it recorded was checked now"
_CUT_SHORT = "the run could not be written to its end, so it is not known what came later"


class Sample(NamedTuple):
    """A picture of feature maps, with the smallest and largest of their values."""

    step: int
    path: str
    file: Path
    low: float
    high: float


class Run:
    """A run, by the path of its folder or file. Every access reads its current state.

    Nothing in it is executed, created or changed. Any number of processes and threads may read while one writes.

    >>> import tempfile
    >>> import torch
    >>> from torchhook import Reduce, Site, check
    >>> from torchhook.training.logs import Entry
    >>> from torchhook.training.runs import RunLog
    >>> folder, reduce = tempfile.mkdtemp(), Reduce("moments")
    >>> log = RunLog(folder)
    >>> log.begin({"model": "Net"})
    >>> for step in range(3):
    ...     reduce.cell(Site("fc"), torch.nn.Linear(1, 1)).update(torch.full((4,), float(step)))
    ...     log.write(Entry(step, 0.0, reduce.snapshot(), losses={step: 1 / (step + 1)}))
    ...     reduce.reset()
    >>> with Run(folder) as run:
    ...     print(run.state, run.steps, run.window(2)["fc"].mean)
    ...     print(run.series("mean").values)
    ...     print(check(run.history(), model=run.model))
    running [0, 1, 2] 2.0
    tensor([[0., 1., 2.]], dtype=torch.float64)
    Net: nothing found
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._source = Source(located(Path(path)))
        self.folder = self._source.file.parent
        self._life()

    def close(self) -> None:
        """Close the file. (The end of the ``with`` block does this.)"""
        self._source.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def about(self) -> dict[str, Any]:
        """Names, versions and settings of the training, and how its layers are connected."""
        return self._source.read(
            lambda db: {key: json_of(value) for key, value in rows(db, "SELECT key, value FROM about", (TEXT, TEXT))}
        )

    @property
    def wires(self) -> list[tuple[str, str]]:
        """Pairs of layers whose first feeds the second."""
        return self._source.read(
            lambda db: [(str(source), str(path)) for source, path in queries.told(db, "wires", ())]
        )

    @property
    def model(self) -> str:
        """The name of the model."""
        return str(self._source.read(lambda db: queries.told(db, "model", "model")))

    @property
    def state(self) -> str:
        """``"running"``, ``"ended"``, ``"failed"``, ``"interrupted"``, or ``"killed"`` if its process is gone.

        ``"unwritten"`` is a run whose end could not be written, as on a full disk. Whether it was killed is only known
        on the machine where it was written.
        """
        life = self._life()
        if life.state == "running" and (self.folder / UNWRITTEN).exists():
            return UNWRITTEN
        return "killed" if life.state == "running" and is_gone(life.owner) else life.state

    @property
    def started(self) -> float:
        """When it began, in seconds since 1970."""
        return self._life().started

    @property
    def ended(self) -> float | None:
        """When it ended; None if it is running, or was killed."""
        return self._life().ended

    @property
    def places(self) -> dict[Place, Row]:
        """What was measured, like `Snapshot.rows` but without the numbers."""
        return self._source.read(lambda db: dict(queries.places(db).values()))

    @property
    def times(self) -> dict[int, float]:
        """The time of each measured step, in seconds since 1970."""
        query = "SELECT step, time FROM windows ORDER BY step"
        return self._source.read(lambda db: {step: moment(time) for step, time in rows(db, query, (WHOLE, NUMBER))})

    @property
    def steps(self) -> list[int]:
        """The measured steps that are stored; in a long training, old ones are thinned out."""
        return self._source.read(queries.steps)

    def steps_with(self, stat: str) -> list[int]:
        """The steps in which a statistic was collected somewhere; expensive ones are collected less often."""
        return self._source.read(partial(queries.steps_with, stat=stat))

    @property
    def losses(self) -> dict[int, float]:
        """The losses, by step."""
        return self._source.read(queries.losses)

    def losses_after(self, step: int) -> dict[int, float]:
        """The losses of the steps after `step`."""
        return self._source.read(partial(queries.losses, after=step))

    def loss_curve(self, most: int = 60) -> dict[int, float]:
        """At most `most` of the losses, evenly spread, including the first and the last; cheap in a long training."""
        chosen((), most)
        return self._source.read(partial(queries.loss_curve, most=most))

    @property
    def rates(self) -> dict[int, float]:
        """The largest learning rate, by measured step."""
        query = "SELECT step, rate FROM windows WHERE rate IS NOT NULL ORDER BY step"
        return dict(self._rows(query, (WHOLE, NUMBER)))

    @property
    def rank_steps(self) -> list[int]:
        """The steps of which something is known by rank; none if one process trained alone."""
        return self._source.read(ranks.steps)

    def ranks(self, most: int | None = None) -> list[RankStep]:
        """What each of several ranks saw, by measured step; of more than `most`, some that are evenly spread."""
        return self._source.read(partial(_ranks, most=most))

    def rank_step(self, step: int) -> RankStep:
        """What each of several ranks saw in one of `rank_steps`."""
        return self._source.read(lambda db: ranks.read(db, step, _places(db)))

    @property
    def findings(self) -> list[Finding]:
        """All findings, in the order in which they were made."""
        return self._source.read(
            lambda db: [
                finding
                for (data,) in rows(db, "SELECT data FROM findings ORDER BY seen, rowid", (TEXT,))
                for finding in from_json(data).findings
            ]
        )

    @property
    def current_findings(self) -> list[Finding]:
        """Those of the report, as of the last check; all so far if there is none that can be read."""
        found = self.findings  # a run in which they are broken is corrupt, and says so
        with suppress(RunError):
            if (report := self._stored()) is not None:
                return list(report.findings)
        return found

    @property
    def report(self) -> Report | None:
        """The report as of the last check; None if there was no check yet."""
        report = self._stored()
        return report and replace(report, losses=self.losses)

    def judged(self) -> Report:
        """The report; if there is none because the run was killed, one that is made now from what was measured.

        It says if the run has not ended, or was not written to its end.
        """
        state, report = self.state, self.report
        if report is None:
            report = self._unchecked() if state == "running" else self._checked_now()
        if state == "ended":
            return report
        notes = (*report.notes, _CUT_SHORT) if state == UNWRITTEN else report.notes
        return replace(report, notes=notes, about={**report.about, "state": state})

    def why(self, fail_on: str = "error") -> Why:
        """What is wrong, on what evidence, and what to try next: for people (`print` it) and programs (`to_dict`)."""
        report = self.judged()
        folder, steps = str(self.folder), len(self.steps)
        return Why(folder, self.state, self.last_step, steps, report.passing(fail_on), self.lines)

    @property
    def lines(self) -> dict[str, str]:
        """The source lines of the calls of layers, by path, in the first measured step."""
        return self._texts("lines")

    @property
    def shapes(self) -> dict[str, str]:
        """The shape of each layer's output, by path, in the first measured step."""
        return self._texts("shapes")

    @property
    def containers(self) -> dict[str, str]:
        """The classes of the modules that contain others, by path."""
        return self._texts("containers")

    @property
    def last_step(self) -> int | None:
        """The last step whose loss or statistics are stored; None if there is none."""
        query = "SELECT (SELECT max(step) FROM windows), (SELECT max(step) FROM losses)"
        ((measured, known),) = self._rows(query, (MAYBE_WHOLE, MAYBE_WHOLE))
        return max((step for step in (measured, known) if step is not None), default=None)

    @property
    def samples(self) -> list[Sample]:
        """Pictures of feature maps."""
        query = "SELECT step, path, file, low, high FROM samples ORDER BY step, rowid"
        folder = self.folder / SAMPLES
        return [
            Sample(step, path, folder / Path(file).name, number(low), number(high))
            for step, path, file, low, high in self._rows(query, (WHOLE, TEXT, TEXT, MAYBE_NUMBER, MAYBE_NUMBER))
        ]

    @property
    def size(self) -> int:
        """Its size in bytes, including samples."""
        files = [self.folder / f"{FILE}{suffix}" for suffix in ("", *BESIDE)]
        return sum(map(_size, (*files, *(self.folder / SAMPLES).glob("*.png"))))

    def window(self, step: int) -> Snapshot:
        """What was measured in a step."""
        found = self._source.read(partial(queries.entry, step=step))
        if found is None:
            near = min(self.steps, key=lambda known: abs(known - step), default=None)
            known = "nothing was measured yet" if near is None else f"{near} is the nearest step that is stored"
            raise NotRecordedError(f"step {step} was not measured, or was thinned out since; {known}")
        return found.snapshot

    def windows(self, most: int | None = None) -> Iterator[Entry]:
        """The measured steps; of more than `most`, some that are evenly spread."""
        for step in chosen(self.steps, most):
            entry = self._source.read(partial(queries.entry, step=step))
            if entry is not None:  # else it was thinned out meanwhile
                yield entry

    def history(self, most: int | None = 128) -> History:
        """What rules read, from at most `most` steps: ``check(run.history())`` reports what is wrong."""
        windows = list(self.windows(most))
        return History(windows=windows, losses=self.losses, rates=self.rates, ranks=self.ranks(most))

    def series(self, field: str, port: str = "output", most: int | None = 1000, *, after: int | None = None) -> Series:
        """A field of the moments (``"mean"``, ``"std"``, ``"l2"``, ``"zero_fraction"``, …) at a port, by path and step.

        If the value at a port is not a single tensor, its first tensor counts. Of more than `most` steps, some that are
        evenly spread are taken; with `after`, only steps after that one.
        """
        require_field(field)
        chosen((), most)
        return self._source.read(partial(queries.series, field=field, port=port, most=most, after=after))

    def blocks(self, stat: str = Moments.name, most: int | None = None) -> Iterator[Group]:
        """All states of a statistic as tensors, some steps at a time."""
        steps = chosen(self.steps, most)
        for first in range(0, len(steps), AT_ONCE):
            some = steps[first : first + AT_ONCE]
            yield from self._source.read(partial(queries.groups, steps=some, stat=stat))

    def __repr__(self) -> str:
        return f"Run({printable(str(self.folder))!r}: {self._line()})"

    def _repr_html_(self) -> str:
        return boxed(f"<p><b>{text(str(self.folder))}</b>: {text(self._line())}</p>{''.join(map(card, self.findings))}")

    def _line(self) -> str:
        steps, findings = self.steps, len(self.findings)
        until = f" until {steps[-1]}" if steps else ""
        return (
            f"{printable(self.model)}, {printable(self.state)}, {len(steps):,} measured steps{until},"
            f" {findings} finding{'' if findings == 1 else 's'}, {in_units(self.size)}"
        )

    def _stored(self) -> Report | None:
        """The report without the losses, of which there may be many."""
        return self._source.read(
            lambda db: next((from_json(data) for (data,) in rows(db, "SELECT data FROM report", (TEXT,))), None)
        )

    def _unchecked(self) -> Report:
        return Report(tuple(self.findings), self.model, losses=self.losses, notes=(_UNCHECKED,))

    def _checked_now(self) -> Report:
        try:
            report = check(self.history(), model=self.model)
        except RunError:
            raise
        except Exception as error:  # the file may contain anything
            raise RunError(f"{str(self._source.file)!r} is not a run, or is corrupt ({error})") from error
        return replace(report, notes=(*report.notes, _CHECKED_NOW))

    def _life(self) -> queries.Life:
        return self._source.read(queries.life)

    def _texts(self, key: str) -> dict[str, str]:
        return self._source.read(lambda db: {str(path): str(text) for path, text in queries.told(db, key, {}).items()})

    def _rows(self, query: str, kinds: Sequence[tuple[type, ...]]) -> list[Any]:
        return self._source.read(lambda db: list(rows(db, query, kinds)))


def _ranks(db: sqlite3.Connection, most: int | None) -> list[RankStep]:
    places = _places(db)
    return [ranks.read(db, step, places) for step in chosen(ranks.steps(db), most)]


def _places(db: sqlite3.Connection) -> dict[int, Place]:
    return {number: place for number, (place, _) in queries.places(db).items()}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:  # it may be gone meanwhile
        return 0
