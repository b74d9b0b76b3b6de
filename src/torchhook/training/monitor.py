"""`Monitor`: watch a training from the side, write down what is measured, and report what is wrong."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from torchhook.core.errors import RunError, StopTraining
from torchhook.core.findings import Finding, Report, Severity
from torchhook.core.renamed import renamed
from torchhook.core.selection import require_module, unwrapped, walk
from torchhook.core.tap import require_count
from torchhook.core.text import warn
from torchhook.core.transfer import sent_home
from torchhook.render.to_json import from_json
from torchhook.rules.check import check
from torchhook.rules.history import History, settled
from torchhook.rules.loop import Loop
from torchhook.rules.loss_graph import LossTerm
from torchhook.rules.registry import Choice, chosen
from torchhook.rules.rest import Rest, at_rest
from torchhook.stats.optimizer.steps import unwrapped as torch_optimizer
from torchhook.stats.reading import Snapshot
from torchhook.training.ending import ending, failure, from_here, tell
from torchhook.training.instruments import SELDOM, Instruments
from torchhook.training.judge import Judge
from torchhook.training.logs import Entry, Log, Target, targets
from torchhook.training.price import Price
from torchhook.training.process import described, device_of, header, rank, world_size
from torchhook.training.ranks.connect import connected
from torchhook.training.ranks.gather import Answers, Gather
from torchhook.training.ranks.probe import checksums
from torchhook.training.ranks.seat import may_end_apart, require_mesh, seat_of
from torchhook.training.ranks.signals import TERMINATED, Terminated
from torchhook.training.ranks.tree import Tree
from torchhook.training.runs.folders import new_folder
from torchhook.training.runs.run import Run
from torchhook.training.runs.writer import RunLog
from torchhook.training.wires import Wires
from torchhook.training.worker import Arriving, Worker

OnFinding = Literal["stop", "warn"] | Callable[[Finding], None]
Loss = Tensor | float | Callable[[], float]  # a callable reads a loss that is on its way to the host
Terms = Callable[[], Sequence[LossTerm]]
_DEAR = 0.02  # seconds that handing over losses takes at the most: a price of less waits longer than a second
_MOST = 20_000  # losses that wait while the logs are slower than the training


class Notes(Protocol):
    """Takes notes of the loop around a training."""

    has_ended: bool

    def facts(self) -> Callable[[], Loop]:
        """A reader of what is known by now."""


class Monitor:
    """Watches the training of `model` from now on, and costs next to none of its time.

    One step in `every` is measured. A thread writes what the rules need to a run on disk, and checks the rules.
    `monitor.findings` has what was found so far, `monitor.report` is the report. At the end, one line on standard error
    says what was found and where to look.

    Args:
        optimizer: The optimizer that trains the model. Without it, nothing is known about updates.
        every: Measure one step in `every`.
        rules, ignore, per_module: As for `check`.
        to: Where to write: a folder, which gets a new run, a log such as those of `torchhook.integrations`, or a list
            of these.
        on_finding: What to do about a new finding. ``"warn"`` warns. ``"stop"`` raises `StopTraining` at the step after
            an error was found. A function is called with the finding, at a step, in the training's own thread.
        name: The name of the run.
        first_step: The number of the first step, for a training that continues from a checkpoint.
        max_bytes: The size limit of the run. Beyond it, old steps are thinned out.
        price: The share of the training's time that watching may cost, as a mean over all steps. To keep it, fewer
            steps than one in `every` are measured, and rules are checked less often. A training of under a minute may
            overdraw it, by at most a second, because its first steps are measured anyway. With None, `every` alone
            counts.
        mesh: With several ranks, the mesh of devices, if the model does not tell: its dims have names such as ``"dp"``,
            ``"tp"`` and ``"pp"``.

    Of several ranks, each of which has a monitor, one writes the run for all, and reports; `docs/ranks.md` has more.

    >>> from torchhook import Monitor
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with Monitor(model, optimizer, every=2, to=[]) as monitor:
    ...     for _ in range(10):
    ...         loss = model(torch.randn(16, 4)).square().mean()
    ...         optimizer.zero_grad()
    ...         loss.backward()
    ...         optimizer.step()
    ...         monitor.step(loss=loss)
    >>> print(monitor.report)
    Sequential: nothing found
    """

    @renamed(max_mb=("max_bytes", lambda mib: round(mib * 2**20)))
    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        every: int = 10,
        rules: Iterable[Choice] | None = None,
        to: Target | Iterable[Target] = "runs",
        *,
        ignore: Sequence[Choice] = (),
        per_module: Mapping[str, Sequence[str]] | None = None,
        on_finding: OnFinding | None = None,
        name: str | None = None,
        first_step: int = 0,
        max_bytes: int = 2**28,
        price: float | None = 0.02,
        mesh: Any = None,
    ) -> None:
        require_module(model)
        require_mesh(mesh)
        require_count(every, "every")
        _require_share(price)
        _require_usable(on_finding)
        where = targets(to)
        applied = chosen(rules, ignore)
        self.model_name = type(unwrapped(model)).__name__
        self.every = every
        self.on_finding = on_finding
        self.first_step = first_step
        self.steps = first_step  # the number of the next step
        self.tells = rank() == 0  # at the end, in one line
        self.writes = True  # whether it writes a run, which only one of several ranks does
        self.state = "running"
        self.findings: list[Finding] = []
        self.run: Path | None = None
        self._log: RunLog | None = None  # which writes the run
        self._place: str | None = None  # of the run, as seen from the folder where the training began
        self._report: Report | None = None
        self._process = os.getpid()
        self._open = True
        self._broken: int | None = None  # the step since which the loss is not finite, as far as it is known here
        self._quiet = 0  # how many of the next steps need no look, if they are not measured
        self._rates: dict[int, float] = {}  # by step, until the worker takes them
        self._losses: dict[int, Loss] = {}
        self._gave = time.monotonic()  # when losses were last handed over
        self._patience = 1.0 if price is None else max(1.0, _DEAR / price)  # seconds until they are again
        self._terms: dict[int, Terms] = {}  # what the losses compare
        self.notes: Notes | None = None  # on the loop around the training, if a launcher takes them
        history = History(rest=at_rest(model, optimizer), own_optimizer=optimizer is not None, first_step=first_step)
        checked = partial(check, rules=applied, per_module=per_module, model=self.model_name)
        faulted = partial(_faulted, weakref.ref(self))
        self._price = None if price is None else Price(price, model, on_finding is not None, every)
        tree = connected()
        self._terminated: Terminated | None = None  # tells other ranks and the run about the end
        self._instruments = Instruments(
            model, optimizer, applied, history, every, self._price, faulted, tree is not None
        )
        self._clock = self._instruments.clock
        try:
            judge = Judge(history, checked, on_finding is not None, self._price)
            self._make_logs = partial(self._logs, where, name or self.model_name, max_bytes)
            first_logs = self._make_logs(None) if tree is None or tree.is_root else ()
            self._worker = Worker(judge, first_logs, self._price)
        except BaseException:
            self._instruments.detach()
            raise
        self._at_exit = weakref.finalize(self, _closed_at_exit, weakref.ref(self))
        about = {
            "model": self.model_name,
            "optimizer": None if optimizer is None else torch_optimizer(optimizer).__class__.__name__,
            "every": every,
            "price": price,
            "rules": [rule.code for rule in applied],
            "device": device_of(model),
            "containers": {
                path: type(module).__name__ for path, module in walk(model) if path and any(module.children())
            },
            **described(),
        }
        self._about = about
        self._worker.about = header(about, self._place)
        self._worker.begin(about)
        if tree is not None:
            try:
                self._join(tree, model, mesh)
            except Exception as error:  # a fault of ours must not stop the training: this rank is watched alone
                self._worker.fail("joining the other ranks", error)
                _taken_over(weakref.ref(self), self._worker, None)

    def step(self, loss: Tensor | float | None = None, step: int | None = None) -> None:
        """Call this after each step of the training.

        `loss` is read later, so that nothing waits for it. `step` is the number of the step, if it is not the next one.
        """
        if step is not None:
            self.steps = step
        try:
            if self._quiet and not self._clock.active:  # where steps are quick, most do no more than this
                self._quiet -= 1
                self._keep(loss)
                self.steps += 1
                return
            if not self._open or os.getpid() != self._process:
                return
            begun = time.perf_counter()
            self._step(loss)
            if self._worker.has_work_here:
                self._worker.deliver()
            self._quiet = self._instruments.end_step(begun, self._quiet)
        except Exception as error:  # a fault of ours must not stop the training
            self._give_up(error)
        self.steps += 1
        if self._open and not self._worker.findings.empty() and self.steps >= self._worker.act_at:
            self._react()

    def wait(self, rest: Rest | None = None) -> None:
        """Measure the next step first: the one that runs now began before the monitor did.

        `rest` is the state of the model before its first step, if that is known.
        """
        if self._open:
            self._instruments.clock.wait()
            self._worker.judge.history.rest = rest or self._worker.judge.history.rest

    @property
    def is_measuring(self) -> bool:
        """Whether the step that runs now is measured."""
        return self._open and self._instruments.clock.active

    def compare(self, terms: Terms) -> None:
        """What the loss of the step that runs now compares; `terms` is called later, in another thread."""
        self._terms[self.steps] = terms

    def unscaled(self, loss: Tensor) -> Tensor:
        """`loss` without the factor of a GradScaler."""
        return self._instruments.watch.unscaled(loss) if self._open else loss

    @property
    def report(self) -> Report:
        """The report as of the last check; once the monitor is closed, the final one."""
        return self._worker.report() if self._report is None else self._report

    @property
    def should_stop(self) -> bool:
        """Whether an error was found."""
        return any(finding.severity >= Severity.ERROR for finding in self.findings)

    def close(self, state: str = "ended", error: BaseException | None = None) -> None:
        """Stop watching, write what is left, and make the final report. Further calls do nothing.

        `error` is what the training failed with, if its state is ``"failed"``. The monitor lets go of the model, which
        may then be freed while the monitor and its report are still used. A monitor that is never closed does all this
        when it is garbage collected, or when Python exits.
        """
        if not self._open or os.getpid() != self._process:
            return
        if self._worker.is_current_thread:  # garbage was collected there, and a thread cannot wait for itself
            threading.Thread(target=self.close, args=(state, error)).start()
            return
        self._open, self._quiet, self.state = False, 0, state
        if self._terminated is not None:
            self._terminated.begin_to_end()
        last = None
        try:
            history = self._worker.judge.history
            history.after = self._instruments.watch.rest()
            if self.notes is not None:
                self.notes.has_ended = state == "ended"
                history.loop = self.notes.facts()()
            if state == "failed" and error is not None:
                self._worker.about = {**self._worker.about, "error": failure(error)}
            if self._worker.gather is not None:
                self._worker.may_end_apart = may_end_apart(self._instruments.watch.model)
            last = self._last()
        except Exception as fault:
            self._worker.fail("reading the last step", fault)
        self._at_exit.detach()
        self._worker.steps = self.steps - self.first_step
        report = _finished(self._instruments, self._worker, state, last)
        if self.unwritten:  # then a report does not name the run as the place where it comes from
            report = replace(report, about={name: fact for name, fact in report.about.items() if name != "run"})
        self._report = report
        self._collect()
        if self._terminated is not None:
            self._terminated.close()
        self.writes = self._worker.writes
        self.tells &= self.writes
        del self._instruments, self._worker, self._clock
        self.notes = None  # which know the model
        if self.tells:
            tell(self.ending)

    @property
    def ending(self) -> str:
        """The line with which the training ends: what was found, and where to look."""
        missing = "" if self._log is None else self._log.missing
        return ending(self.report, self.steps - self.first_step, self.state, self._place, self.unwritten, missing)

    @property
    def unwritten(self) -> str:
        """From which step on the run cannot be written, and why; empty if it is written."""
        return "" if self._log is None else self._log.unwritten

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(state_of(error), error)

    def __del__(self) -> None:
        if getattr(self, "_at_exit", None) is not None:  # else it was never complete
            self.close()

    def __repr__(self) -> str:
        where = f", in {self.run}" if self.run and not self.unwritten else ""
        return f"<Monitor of {self.model_name}: {self.steps} steps, {len(self.findings)} findings{where}>"

    def _step(self, loss: Tensor | float | None) -> None:
        self._keep(loss)
        instruments = self._instruments
        if (rate := instruments.watch.rate()) is not None:
            self._rates[self.steps] = rate
        instruments.watch.count_step()
        if instruments.has_measured:
            if not self._give(self._entry(self.steps, *instruments.take())):
                self._worker.lost += 1
            instruments.plan()
        elif len(self._losses) >= SELDOM * self.every or self._is_due:
            self._give_losses()
        if len(self._rates) > _MOST or len(self._losses) > _MOST:
            for numbers in (self._losses, self._rates, self._terms):
                for step in list(numbers)[: _MOST // 2]:
                    del numbers[step]

    @property
    def _is_due(self) -> bool:
        """Whether losses have waited so long that they are worth a little: if the process is killed, they are lost.

        Several ranks have to hand over those of the same steps, at measured ones.
        """
        has_waited = time.monotonic() - self._gave > self._patience
        return has_waited and bool(self._losses) and self._worker.gather is None

    def _keep(self, loss: Tensor | float | None) -> None:
        """Keep a loss until the next entry; look at the next step if it is not finite, as far as that is known here."""
        if loss is None:
            return
        kept = self._losses[self.steps] = _kept(loss) if isinstance(loss, Tensor) else float(loss)
        if not isinstance(kept, float) or math.isfinite(kept):
            self._broken = None
        elif self._broken is None:
            self._broken = self.steps
            if self._price is not None:
                self._price.alarm(is_urgent=True)
                self._clock.hurries = True

    def _last(self) -> Arriving | None:
        """What is left at the end of the training; a step that has only begun is dropped."""
        if self._instruments.has_measured:
            return self._entry(self.steps, *self._instruments.take())
        return self._entry(self.steps - 1) if self._losses else None

    def _entry(
        self,
        step: int,
        snapshot: Snapshot | None = None,
        maps: Callable[[], Mapping[str, Tensor]] = dict,
        wires: Wires | None = None,
    ) -> Arriving:
        """An entry on its way to the host, with the losses and rates that wait."""
        readers = _sent(self._losses)
        self._losses = dict(readers)  # in case they have to wait for the next entry, they are not sent again
        rates, terms, now = dict(self._rates), dict(self._terms), time.time()
        loop = None if self.notes is None else self.notes.facts()
        local = self._instruments.take_local() if self._worker.gather is not None else dict
        seen = wires or Wires()
        pairs, lines, shapes = list(seen.pairs), dict(seen.lines), dict(seen.shapes)  # without the graph
        return lambda: Entry(
            step,
            now,
            settled(snapshot or Snapshot({})),
            {at: read() for at, read in readers.items()},
            rates[max(rates)] if rates else None,
            maps(),
            pairs,
            rates,
            {at: read() for at, read in terms.items()},
            None if loop is None else loop(),
            lines,
            shapes,
            local(),
        )

    def _give(self, entry: Arriving) -> bool:
        """Hand an entry to the worker; if it has no room, losses and rates wait for the next entry."""
        self._worker.judge.history.scaled |= self._instruments.watch.is_scaled
        has_room, self._gave = self._worker.put(entry), time.monotonic()
        if has_room:
            self._losses, self._rates, self._terms = {}, {}, {}
        return has_room

    def _give_losses(self) -> None:
        """Hand over the losses alone, if the next measured step is far and that can be afforded."""
        if self._price is None:
            if len(self._losses) % (SELDOM * self.every) == 0 or self._is_due:  # or the optimizer does not step
                self._give(self._entry(self.steps))
            return
        is_broken = self._broken is not None and self.steps > self._broken + SELDOM
        if is_broken or self._is_due or len(self._losses) > _MOST // 2 or self._price.allows_entry():
            begun = time.perf_counter()
            self._give(self._entry(self.steps))
            self._price.book(time.perf_counter() - begun)

    def _join(self, tree: Tree, model: nn.Module, mesh: Any) -> None:
        """Be one of several ranks from now on."""
        self.tells = True  # if it writes the run
        worker, found = self._worker, weakref.ref(self)
        calls = Answers(
            partial(_arrived, found, worker),
            partial(_taken_over, found, worker),
            partial(_heard, found, worker),
            partial(worker.fail, "gathering the ranks"),
        )
        worker.writes = self.writes = tree.is_root
        worker.apart = self.every
        seat = seat_of(model, rank(), mesh)
        if seat.pipelined:
            self._instruments.clock.wait()
        worker.gather = Gather(seat, world_size(), tree, calls)
        if self.run is not None:
            worker.gather.say({"run": str(self.run.absolute())})
        sums = checksums(model, self._instruments.watch.optimizer)
        worker.put(lambda: Entry(self.first_step - 1, time.time(), Snapshot({}), local={"sums": sums()}))
        self._terminated = Terminated(partial(_terminated, found))

    def _react(self) -> None:
        """Act on new findings, as `on_finding` says."""
        for finding in self._collect():
            if callable(self.on_finding):
                self.on_finding(finding)
            elif self.on_finding == "warn":
                warn(str(finding))
            elif self.on_finding == "stop" and finding.severity >= Severity.ERROR:
                raise StopTraining(f"{finding}\n{finding.hint}")

    def _collect(self) -> list[Finding]:
        new = []
        while not self._worker.findings.empty():
            new.append(self._worker.findings.get())
        self.findings += new
        return new

    def _give_up(self, error: Exception) -> None:
        self._worker.fail("watching (which has stopped)", error)
        self.close("failed")

    def _logs(self, to: list[Target], name: str, max_bytes: int, known: str | None) -> Iterable[Log]:
        """The logs. The first run goes on in the folder that is `known`, if another rank has begun it."""
        for one in to:
            if isinstance(one, Log):
                yield one
                continue
            folder = Path(known) if known and self._log is None else new_folder(one, name)
            log = RunLog(folder, max_bytes=max_bytes)
            if self._log is None:
                self.run, self._log, self._place = folder, log, from_here(folder)
            yield log


def _require_usable(on_finding: Any) -> None:
    if not (on_finding in (None, "stop", "warn") or callable(on_finding)):
        raise ValueError(f"on_finding must be 'stop', 'warn', a function or None, not {on_finding!r}")


def _require_share(price: Any) -> None:
    if price is not None and (isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < 1):
        raise ValueError(f"price must be a share between 0 and 1, such as 0.02, or None, not {price!r}")


def _kept(loss: Tensor) -> Tensor | float:
    """A loss as it is now. One on the host is read; for any other, nothing waits."""
    if loss.numel() != 1:
        loss = loss.detach().double().mean()
    return loss.item() if loss.is_cpu else loss.detach().clone().reshape(())


def _faulted(monitor: weakref.ref[Monitor], error: Exception) -> None:
    """A tap raised inside the user's own forward or backward, which continues without that tap."""
    found = monitor()
    if found is not None and found._open:
        found._worker.fail("a measurement (which has stopped)", error)


def _finished(instruments: Instruments, worker: Worker, state: str, last: Arriving | None = None) -> Report:
    """Leave the model as it was, and finish the logs."""
    try:
        instruments.detach()
    except Exception as error:
        worker.fail("detaching from the model", error)
    return worker.finish(state, last)


def _arrived(monitor: weakref.ref[Monitor], worker: Worker, entry: Entry) -> None:
    """On the rank that writes the run, the entry of all ranks is there; they are told how far apart to measure."""
    apart = max((int(facts.get("apart", 1)) for facts in entry.ranks.facts.values()), default=1) if entry.ranks else 1
    if entry.ranks is not None:
        worker.about = {**worker.about, "ranks": entry.ranks.said}
    stretch = 1 << max(0, math.ceil(apart / worker.apart) - 1).bit_length()
    found = monitor()
    if found is not None and found._open and stretch != found._instruments.stretch and worker.gather is not None:
        found._instruments.stretch = stretch
        worker.gather.say({"stretch": stretch})
    if not worker.put(lambda: entry):
        worker.lost += 1


def _heard(monitor: weakref.ref[Monitor], worker: Worker, news: Mapping[str, Any]) -> None:
    """The rank that writes the run has said something."""
    found = monitor()
    if found is None or not found._open:
        return
    if "stretch" in news:
        found._instruments.stretch = int(news["stretch"])
    if news.get("run"):
        found.run = Path(news["run"])
    if "findings" in news:
        worker.act_at = int(news["from"])
        for finding in from_json(news["findings"]).findings:
            worker.findings.put(finding)


def _taken_over(monitor: weakref.ref[Monitor], worker: Worker, folder: str | None) -> int:
    """This rank writes the run from now on: in `folder`, if another rank has begun it. Returns the last step in it."""
    if worker.writes:
        return -2
    worker.writes, last = True, -2
    if (watching := monitor()) is not None:
        watching.writes = True
    if folder is not None:
        with suppress(RunError), Run(folder) as run:
            last = -2 if run.last_step is None else run.last_step
            worker.judge.history = replace(run.history(), rest=worker.judge.history.rest)

    def begin() -> None:
        found = monitor()
        if found is not None:
            worker.logs = list(found._make_logs(folder))
            worker.about = {**worker.about, **header(found._about, found._place)}
            worker.begin(found._about)

    worker.put(begin)
    return last


def _terminated(monitor: weakref.ref[Monitor]) -> None:
    """The process has to end, and the training is stuck."""
    found = monitor()
    if found is not None:
        found.close("interrupted")


def _closed_at_exit(monitor: weakref.ref[Monitor]) -> None:
    """Close a monitor that is still open when Python exits, perhaps because of an uncaught error."""
    found = monitor()
    if found is not None:  # else it was garbage collected
        is_interactive = hasattr(sys, "ps1")  # there, an error is that of some other line
        error = None if is_interactive else getattr(sys, "last_value", None)
        was_told = found._terminated is not None and found._terminated.was_told  # Python keeps no SystemExit
        found.close("interrupted" if was_told and error is None else state_of(error), error)


def _sent(losses: dict[int, Loss]) -> dict[int, Callable[[], float]]:
    """Readers of losses that are on their way to the host, in one copy per device; none is sent twice."""
    readers: dict[int, Callable[[], float]] = {}
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for step, loss in losses.items():
        if isinstance(loss, Tensor):
            alike.setdefault((loss.device, loss.dtype), {})[step] = loss
        else:
            readers[step] = loss if callable(loss) else partial(float, loss)
    for together in alike.values():
        arrived = sent_home(torch.stack(list(together.values())))
        readers |= {step: partial(_number, arrived, number) for number, step in enumerate(together)}
    return readers


def _number(arrived: Callable[[], Tensor], number: int) -> float:
    return float(arrived()[number])


def state_of(error: BaseException | None) -> str:
    """How a training ended, given what was raised."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "ended"
    is_told = isinstance(error, SystemExit) and error.code == TERMINATED
    return "interrupted" if is_told or isinstance(error, KeyboardInterrupt) else "failed"
