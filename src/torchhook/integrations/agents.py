"""Questions of an agent about the runs in one folder, which are only read.

Nothing outside the folder is read: a name is compared with the names of the runs in it, and never becomes a path.
`mcp` serves the methods of `Questions` as tools, and their docstrings tell an agent how to use them.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torchhook.core.errors import NotRecordedError, RunError, TorchhookError
from torchhook.core.findings import json_value
from torchhook.core.text import escaped
from torchhook.integrations.answers import (
    ComparedRun,
    Comparison,
    Curves,
    Cut,
    Differing,
    LayerRow,
    LayersAnswer,
    Line,
    Number,
    RuleRow,
    Rules,
    RunRow,
    Runs,
)
from torchhook.render.words import finding_title, short
from torchhook.rules import Rule, chosen
from torchhook.training.runs import Run
from torchhook.training.runs.fields import NAMES
from torchhook.training.runs.folders import LATEST, find, latest
from torchhook.training.runs.queries import chosen as spread
from torchhook.training.runs.schema import FILE
from torchhook.training.runs.why import Why

_POINTS = 200  # steps of a series
_ROWS = 100  # of a list
_LINES = 10  # layers of a series
_RUNS = 6  # to compare
_LONGEST = 300  # characters of a name: file systems allow fewer
_OF_WHY = {"findings": 20, "explains": 5}
_OF_MODEL = ("loss", "rate")
_SETTINGS = ("model", "optimizer", "every", "device", "world_size", "command", "versions")


class Questions:
    """What can be asked about the runs in a folder. Every answer is about their state at that moment.

    >>> import tempfile
    >>> from torchhook.training.runs import RunLog
    >>> root = Path(tempfile.mkdtemp())
    >>> RunLog(root / "first").begin({"model": "Net"})
    >>> ask = Questions(root)
    >>> [(row.run, row.model) for row in ask.list_runs().runs]
    [('first', 'Net')]
    >>> ask.why("../first")
    Traceback (most recent call last):
    torchhook.core.errors.RunError: there is no run '../first'; did you mean 'first'?
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.root = Path(folder).resolve()

    def list_runs(self, name: str = "*") -> Runs:
        """List the runs, newest first: state, model, last step, and how many errors and warnings were found.

        `name` is a glob, such as "resnet*". A run in the state "running" is being written now.
        """
        _require_short(name, "name")
        found = [folder for folder in self._folders() if fnmatchcase(_name(folder), name)]
        return Runs([self._row(folder) for folder in found[:_ROWS]], _rest(runs=len(found) - _ROWS))

    def why(self, run: str = LATEST) -> dict[str, Any]:
        """Say what is wrong with a run, on what evidence, and what to try next. Start with this.

        Each finding has its cause, the site with the class of its module and the source line that calls it, the step
        since when, the numbers behind it, the findings that it explains, the repair that was tried, and in "next" the
        experiment to make. Without findings, "looked_at" says what was checked.
        """
        with self._opened(run) as opened:
            return as_answer(opened.why(), _name(opened.folder))

    def series(
        self, run: str = LATEST, what: str = "loss", layers: str = "*", port: str = "output", after: int | None = None
    ) -> Curves:
        """Read a number by step, thinned to at most 200 steps.

        `what` is "loss", "rate" (the learning rate), or a statistic of layers: mean, std, min, max, l2, abs_mean,
        zero_fraction, nonfinite, skewness, kurtosis. Statistics are of the layers (or parameters, at their ports) whose
        paths match the glob `layers`, of ten at most; `port` is one of those that the tool "layers" lists, such as
        "grad_output". With `after`, only later steps are read. A value is null where nothing was measured.
        """
        if what not in (*_OF_MODEL, *NAMES):
            raise ValueError(f"what must be one of {', '.join((*_OF_MODEL, *NAMES))}, not {short(what, 80)!r}")
        _require_short(layers, "layers")
        with self._opened(run) as opened:
            if what in _OF_MODEL:
                values = opened.losses if what == "loss" else opened.rates
                steps = [step for step in values if after is None or step > after]
                kept = spread(steps, _POINTS)
                lines = [Line("", [_number(values[step]) for step in kept])]
                return Curves(_name(opened.folder), what, kept, lines, _rest(steps=len(steps) - len(kept)))
            if port not in _ports(opened):
                raise NotRecordedError(
                    f"nothing was measured at the port {short(port, 80)!r}; {_such_as(_ports(opened))}"
                )
            found = opened.series(what, port, _POINTS, after=after)
            paths = _matching(found.paths, layers)
            rows = found.values.tolist()
            lines = [Line(short(path), list(map(_measured, rows[found.paths.index(path)]))) for path in paths[:_LINES]]
            stored = sum(after is None or step > after for step in opened.steps)
            left_out = _rest(steps=stored - len(found.steps), lines=len(paths) - _LINES)
            return Curves(_name(opened.folder), what, found.steps, lines, left_out)

    def layers(self, run: str = LATEST, layers: str = "*") -> LayersAnswer:
        """List the layers of a run in the order of execution, with their numbers in the last measured step.

        Mean, standard deviation, fraction of zeros and number of NaN and Inf are those of the output; the norm is that
        of its gradient. `layers` is a glob of paths, such as "layer3.*". "ports" is what "series" accepts as `port`.
        """
        _require_short(layers, "layers")
        with self._opened(run) as opened:
            classes = {path: row.label for (path, _), row in opened.places.items() if row.label}
            paths = _matching(list(classes), layers) if classes else []  # at first, nothing is measured yet
            step = max(opened.steps, default=None)
            fields = ("mean", "std", "zero_fraction", "nonfinite")
            numbers = {field: _at(opened, field, "output", step) for field in fields}
            numbers["grad_norm"] = _at(opened, "l2", "grad_output", step)
            codes: dict[str, list[str]] = {}
            for finding in opened.findings:
                codes.setdefault(finding.site, []).append(short(finding.code))
            lines = opened.lines
            rows = [
                LayerRow(
                    short(path),
                    short(classes[path]),
                    short(lines[path]) if path in lines else None,
                    codes.get(path, [])[:_LINES],
                    **{name: by_path.get(path) for name, by_path in numbers.items()},
                )
                for path in paths[:_ROWS]
            ]
            hidden = sum(max(0, len(codes.get(path, ())) - _LINES) for path in paths[:_ROWS])
            left_out = _rest(layers=len(paths) - _ROWS, findings=hidden)
            return LayersAnswer(_name(opened.folder), step, _ports(opened), rows, left_out)

    def compare_runs(self, runs: list[str]) -> Comparison:
        """Put two to six runs side by side: losses, findings, settings that differ, and the layers that differ most.

        Lists of values are in the order of the runs. The standard deviations of outputs and the norms of their
        gradients are from the last measured step of each run.
        """
        if not 2 <= len(runs) <= _RUNS:
            raise ValueError(f"runs must have 2 to {_RUNS} names, not {len(runs)}")
        rows, settings, spreads, norms, hidden = [], [], [], [], 0
        for name in runs:
            with self._opened(name) as opened:
                about, step = opened.about, max(opened.steps, default=None)
                rows.append(_compared(opened))
                hidden += max(0, len(opened.findings) - _LINES)
                settings.append({key: short(str(about[key])) for key in _SETTINGS if key in about})
                spreads.append(_at(opened, "std", "output", step))
                norms.append(_at(opened, "l2", "grad_output", step))
        std, grad_norm = _differing(spreads), _differing(norms)
        left_out = _rest(std=len(std) - _LINES, grad_norm=len(grad_norm) - _LINES, findings=hidden)
        return Comparison(rows, _differing(settings), std[:_LINES], grad_norm[:_LINES], left_out)

    def rules(self, rule: str | None = None) -> Rules:
        """List the rules, or explain some: what each finds, what to do about it, and when it is mistaken.

        `rule` is a code ("TH201"), the beginning of codes ("TH2"), or a name ("dead-units"). By default all rules are
        listed, with one sentence each.
        """
        _require_short(rule or "", "rule")
        found = chosen() if rule is None else chosen([rule.upper() if rule[-1:].isdigit() else rule])
        rows = [_rule_row(one, is_brief=rule is None) for one in found[:_ROWS]]
        return Rules(rows, _rest(rules=len(found) - _ROWS))

    def words(self, error: Exception) -> str:
        """What an error says, with files named relative to the folder."""
        return short(str(error).replace(str(self.root), self.root.name), 1000)

    def _folders(self) -> list[Path]:
        return [self.root] if (self.root / FILE).is_file() else find(self.root)

    def _row(self, folder: Path) -> RunRow:
        try:
            with self._opened_at(folder) as run:
                found = [str(finding.severity) for finding in run.current_findings]
                started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.started))
                state, model, last = short(run.state), short(run.model), run.last_step
                return RunRow(_name(folder), state, model, started, last, found.count("error"), found.count("warning"))
        except TorchhookError as error:
            return RunRow(_name(folder), unreadable=self.words(error))

    @contextmanager
    def _opened(self, name: str) -> Iterator[Run]:
        """The run of this name."""
        _require_short(name, "run")
        folders = self._folders()[::-1]
        shown = {_name(folder): folder for folder in folders}
        known = shown | {folder.name: folder for folder in folders}  # a name is not that of another run, escaped
        if name == LATEST and known:
            name = latest(self.root).name
        if name not in known:
            near = get_close_matches(name, shown, 3) or list(shown)[-3:]
            hint = f"did you mean {', '.join(map(repr, near))}?" if near else "there are no runs in the folder yet"
            raise RunError(f"there is no run {short(name, 80)!r}; {hint}")
        with self._opened_at(known[name]) as run:
            yield run

    @contextmanager
    def _opened_at(self, folder: Path) -> Iterator[Run]:
        try:
            with Run(folder) as run:
                yield run
        except TorchhookError:
            raise
        except Exception as error:  # a run may contain anything
            raise RunError(f"{_name(folder)!r} cannot be read: {type(error).__name__}: {error}") from error


def as_answer(why: Why, name: str) -> dict[str, Any]:
    """What is wrong with the run or model of this name, without the less important of very many findings."""
    cut = Cut(_OF_WHY)
    answer: dict[str, Any] = cut({**why.to_dict(), "run": name})
    return {**answer, "left_out": cut.left_out}


def _compared(run: Run) -> ComparedRun:
    losses = run.losses
    finite = {step: loss for step, loss in losses.items() if math.isfinite(loss)}
    lowest = min(finite, key=finite.__getitem__, default=None)
    values = list(losses.values())
    return ComparedRun(
        run=_name(run.folder),
        state=short(run.state),
        last_step=run.last_step,
        first_loss=_number(values[0]) if values else None,
        last_loss=_number(values[-1]) if values else None,
        lowest_loss=None if lowest is None else _number(finite[lowest]),
        lowest_at=lowest,
        findings=list(map(finding_title, run.findings[:_LINES])),
    )


def _differing(by_run: Sequence[Mapping[str, Number]]) -> list[Differing]:
    """What differs between runs, by name: numbers with the largest ratio first."""
    names = dict.fromkeys(name for one in by_run for name in one)
    values = {name: [one.get(name) for one in by_run] for name in names}
    differing = [name for name in names if len(set(values[name])) > 1]
    return [Differing(short(name), values[name]) for name in sorted(differing, key=lambda name: -_ratio(values[name]))]


def _ratio(values: Sequence[Number]) -> float:
    """The largest by the smallest, infinite if one is zero; 0 if not all are numbers."""
    if not all(isinstance(value, float) for value in values):
        return 0.0
    sizes = [abs(float(value or 0)) for value in values]
    return max(sizes) / min(sizes) if min(sizes) else math.inf


def _at(run: Run, field: str, port: str, step: int | None) -> dict[str, Number]:
    """A field at a port in one step, by path."""
    if step is None:
        return {}
    found = run.series(field, port, 2, after=step - 1)  # a run that is being written may have a later one, too
    return dict(zip(found.paths, map(_measured, found.values[:, 0].tolist()), strict=True)) if found.steps else {}


def _ports(run: Run) -> list[str]:
    return list(dict.fromkeys(short(port.partition("[")[0]) for _, port in run.places))[:_ROWS]


def _rule_row(rule: Rule, is_brief: bool) -> RuleRow:
    finds = " ".join(inspect.cleandoc(type(rule).__doc__ or "").split())
    row = RuleRow(rule.code, rule.name, str(rule.severity), rule.cause, finds, rule.hint, rule.wrong)
    return replace(row, finds=finds.split(". ")[0], what_to_do=None, when_wrong=None) if is_brief else row


def _name(folder: Path) -> str:
    """The name of a run, with escapes for what is unprintable: without it, two names might be the same.

    >>> _name(Path("runs/net" + chr(7)))
    'net\\\\u0007'
    """
    return short(escaped(folder.name), _LONGEST)


def _number(value: float) -> Number:
    number: Number = json_value(float(f"{value:.6g}"))
    return number


def _measured(value: float) -> Number:
    """A statistic, which is NaN where nothing was measured."""
    return None if math.isnan(value) else _number(value)


def _rest(**counts: int) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count > 0}


def _matching(paths: Sequence[str], glob: str) -> list[str]:
    found = [path for path in paths if fnmatchcase(path, glob)]
    if not found:
        near = get_close_matches(glob, paths, 3) or paths[:3]
        raise NotRecordedError(f"no layer matches {short(glob, 80)!r}; {_such_as(near)}")
    return found


def _such_as(names: Iterable[str]) -> str:
    shown = ", ".join(map(repr, map(short, names)))
    return f"there are {shown}" if shown else "nothing was measured yet"


def _require_short(text: str, argument: str) -> None:
    if len(text) > _LONGEST:
        raise ValueError(f"{argument} must have at most {_LONGEST} characters, not {len(text):,}")
