"""`Monitor`: watch a training from beside it, write down what is seen, and say what is wrong."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchhook.core.call_wrapper import compiled_among
from torchhook.core.errors import StopTraining
from torchhook.core.findings import Finding, Report, Severity
from torchhook.core.selection import require_module, unwrapped
from torchhook.core.session import Session
from torchhook.core.tap import require_count
from torchhook.core.text import warn
from torchhook.core.transfer import sent_home
from torchhook.rules.check import check
from torchhook.rules.history import History, joined, settled
from torchhook.rules.registry import Choice, chosen
from torchhook.rules.rest import at_rest
from torchhook.rules.watch import Watch
from torchhook.stats.clock import Clock, Slower
from torchhook.stats.optimizer.steps import unwrapped as bare
from torchhook.stats.reading import Snapshot
from torchhook.training.judge import Judge
from torchhook.training.logs import Entry, Log
from torchhook.training.maps import Maps
from torchhook.training.process import agreed, described, rank
from torchhook.training.runs.folders import new_folder
from torchhook.training.runs.writer import RunLog
from torchhook.training.wires import Wires
from torchhook.training.worker import Arriving, Worker

OnFinding = Literal["stop", "warn"] | Callable[[Finding], None]
Loss = Tensor | float | Callable[[], float]  # the last is on its way to the host
_SELDOM = 10  # one in so many measured steps has what is dearer
_WIDEST = 256  # units of which covariances are kept for as long as the training goes
_RARE = 100  # and one in so many, and the 4th, 8th, 16th, … what is dearest
_MOST = 20_000  # losses that wait for a log which is slower than the training


class Monitor:
    """Watches the training of `model` from now on, and takes next to none of its time.

    One step in `every` is measured, and what the rules need is written to a run on disk and checked beside the
    training. Nothing is printed. `monitor.findings` are what was found until now, `monitor.report` is the report.

    Args:
        optimizer: The one that trains the model. Without it there is nothing to say about updates.
        every: Measure one step in so many.
        rules, ignore, per_module: As for `check`.
        to: Where to write: folders, in which a new run is begun, and logs as of `torchhook.integrations`.
        on_finding: What to do about a new finding: ``"warn"``; ``"stop"`` raises `StopTraining` at the step after an
            error was found; a function is called with the finding, at a step, in the thread of the training.
        name: Of the run.
        first_step: The number of the first step, of a training that goes on from a checkpoint.
        max_mb: How large the run may become: old steps are thinned out.

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

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        every: int = 10,
        rules: Iterable[Choice] | None = None,
        to: Iterable[Log | str | Path] = ("runs",),
        *,
        ignore: Sequence[Choice] = (),
        per_module: Mapping[str, Sequence[str]] | None = None,
        on_finding: OnFinding | None = None,
        name: str | None = None,
        first_step: int = 0,
        max_mb: float = 256,
    ) -> None:
        require_module(model)
        require_count(every, "every")
        _require_usable(on_finding, to)
        applied = chosen(rules, ignore)
        self.model_name = type(unwrapped(model)).__name__
        self.every = every
        self.on_finding = on_finding
        self.steps = first_step  # the number of the next one
        self.findings: list[Finding] = []
        self.run: Path | None = None
        self._report: Report | None = None
        self._process = os.getpid()
        self._open = True
        self._rates: dict[int, float] = {}
        self._losses: dict[int, Loss] = {}
        self._clock = Clock(every, by_passes=False, graded=True)
        self._seldom = Slower(self._clock, _SELDOM)
        self._ended = 0
        self._windows = 0
        history = History(rest=at_rest(model, optimizer), own_optimizer=optimizer is not None, first_step=first_step)
        faulted = partial(_faulted, weakref.ref(self))
        clocks = self._clock, self._seldom
        self._watch = Watch(
            model, applied, optimizer, history, (), *clocks, "all", _WIDEST, detours=False, on_fault=faulted
        )
        self._maps = Maps(self._seldom)
        self._wires = Wires()
        self._wiring = ExitStack()  # is over with the first measured step
        judged = partial(check, rules=applied, per_module=per_module, model=self.model_name)
        with ExitStack() as opened:
            opened.enter_context(self._watch)
            opened.callback(self._watch.forget_thorough)  # or what was half seen would go into a window of the worker's
            opened.push(self._wiring)
            if not compiled_among(model.modules()):
                for taps, stack in ((self._maps.taps(model), opened), (self._wires.taps(model), self._wiring)):
                    if taps:
                        seen = Session(
                            model, taps, scope="all", on_silent="ignore", on_fault=faulted, when=self._seldom
                        )
                        stack.callback(seen.attach().abandon)
            self._watch.begin_thorough()
            self._worker = Worker(Judge(history, judged, on_finding is not None), self._logs(to, name, max_mb))
            self._opened = opened.pop_all()
        self._abandoned = weakref.finalize(self, _left, self._opened, self._worker, "ended")
        self._worker.begin(
            {
                "model": self.model_name,
                "optimizer": None if optimizer is None else bare(optimizer).__class__.__name__,
                "every": every,
                "rules": [rule.code for rule in applied],
                **described(),
            }
        )

    def step(self, loss: Tensor | float | None = None, step: int | None = None) -> None:
        """A step of the training is over.

        `loss` is not waited for. `step` is its number, if it is not simply the next.
        """
        if not self._open or os.getpid() != self._process:
            return
        self.steps = self.steps if step is None else step
        try:
            self._step(loss)
            self._worker.deliver()
        except Exception as error:  # a fault of ours must not stop the training
            self._give_up(error)
        self.steps += 1
        if self._open:
            self._react()

    def unscaled(self, loss: Tensor) -> Tensor:
        """A loss as it was before a GradScaler multiplied it, for those who only know it afterwards."""
        return self._watch.unscaled(loss) if self._open else loss

    @property
    def report(self) -> Report:
        """What was found until the last check; once the monitor is closed, in all."""
        return self._worker.report() if self._report is None else self._report

    @property
    def should_stop(self) -> bool:
        """Whether something was found that is broken."""
        return any(finding.severity >= Severity.ERROR for finding in self.findings)

    def close(self, state: str = "ended") -> None:
        """Stop watching, write what is left, and make the report. More than once is as good as once.

        The model is let go: it may be freed while the monitor, and its report, are still there.
        """
        if not self._open or os.getpid() != self._process:
            return
        self._open = False
        last = None
        try:
            self._worker.judge.history.after = self._watch.rest()
            last = self._last()
        except Exception as error:
            self._worker.fail("the last step", error)
        self._abandoned.detach()
        self._report = _left(self._opened, self._worker, state, last)
        self._collect()
        del self._watch, self._maps, self._wires, self._opened, self._worker

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(state_of(error))

    def __repr__(self) -> str:
        where = f", in {self.run}" if self.run else ""
        return f"<Monitor of {self.model_name}: {self.steps} steps, {len(self.findings)} findings{where}>"

    def _step(self, loss: Tensor | float | None) -> None:
        if loss is not None:
            self._losses[self.steps] = loss.detach().clone() if isinstance(loss, Tensor) else float(loss)
        if (rate := self._watch.rate()) is not None:
            self._rates[self.steps] = rate
        self._watch.count_step()
        if self._clock.ended > self._ended:
            self._take()
        elif self._losses and len(self._losses) % (_SELDOM * self.every) == 0:  # the optimizer takes no part
            self._give(self._unmeasured(self.steps))
        for numbers in (self._losses, self._rates):
            if len(numbers) > _MOST:
                numbers.pop(next(iter(numbers)))

    def _take(self) -> None:
        """Give what was measured to the thread, and decide what is measured next."""
        if not self._give(self._measured()):
            self._worker.lost += 1
        self._windows += 1
        is_power = self._windows & (self._windows - 1) == 0
        if (is_power and self._windows > 2) or self._windows % _RARE == 0:
            self._watch.begin_thorough()

    def _last(self) -> Arriving | None:
        """What is left when the training is over: of a step that was only begun, nothing."""
        if self._clock.ended > self._ended:
            return self._measured()
        return self._unmeasured(self.steps - 1) if self._losses else None

    def _unmeasured(self, step: int) -> Arriving:
        return self._entry(step, Snapshot({}))

    def _measured(self) -> Arriving:
        self._ended = self._clock.ended
        snapshots: list[Snapshot] = [self._watch.window()]
        if self._watch.is_thorough:
            snapshots.append(self._watch.end_thorough())
        self._wiring.close()
        wires, self._wires = list(self._wires.pairs), Wires()
        return self._entry(self.steps, joined(snapshots), self._maps.taken(), wires)

    def _entry(
        self,
        step: int,
        snapshot: Snapshot,
        maps: Callable[[], Mapping[str, Tensor]] = dict,
        wires: Sequence[tuple[str, str]] = (),
    ) -> Arriving:
        """A step with the losses and rates that were not written yet, on its way to the host."""
        readers = _sent(self._losses)
        self._losses = dict(readers)  # if the worker has no room, they are not sent again
        rates, now = dict(self._rates), time.time()
        return lambda: Entry(
            step,
            now,
            settled(snapshot),
            {at: read() for at, read in readers.items()},
            rates[max(rates)] if rates else None,
            maps(),
            wires,
            rates,
        )

    def _give(self, entry: Arriving) -> bool:
        """Hand a step to the worker. If it has no room, losses and rates come with the next one."""
        self._worker.judge.history.scaled |= self._watch.is_scaled
        has_room = self._worker.put(entry)
        if has_room:
            self._losses, self._rates = {}, {}
        return has_room

    def _react(self) -> None:
        """Do what is to be done about new findings."""
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
        self._worker.fail("watching, which has ended,", error)
        self.close("failed")

    def _logs(self, to: Iterable[Log | str | Path], name: str | None, max_mb: float) -> Iterable[Log]:
        for one in to:
            if isinstance(one, Log):
                yield one
                continue
            folder = _folder(Path(one), name or self.model_name)
            self.run = self.run or folder
            yield RunLog(folder, max_mb=max_mb)


def _require_usable(on_finding: Any, to: Any) -> None:
    if not (on_finding in (None, "stop", "warn") or callable(on_finding)):
        raise ValueError(f"on_finding must be 'stop', 'warn', a function or None, not {on_finding!r}")
    if isinstance(to, (str, Path, Log)):
        raise TypeError(f"to must be a list of folders and logs: to=[{to!r}]")


def _folder(root: Path, name: str) -> Path:
    """Where this process writes: the first one into the run itself, others below it."""
    number = rank()
    if number == 0:
        folder = new_folder(root, name)
        agreed(folder.name)
        return folder
    return root / agreed(f"{name}-{os.getpid()}") / f"rank{number}"


def _faulted(monitor: weakref.ref[Monitor], error: Exception) -> None:
    """A tap has raised, inside of the user's own forward or backward, which goes on without it."""
    found = monitor()
    if found is not None and found._open:
        found._worker.fail("measuring, a part of which has ended,", error)


def _left(opened: ExitStack, worker: Worker, state: str, last: Arriving | None = None) -> Report:
    """Leave the model as it was, and finish; also if nobody has the monitor any more, which is not needed for it."""
    try:
        opened.close()
    except Exception as error:
        worker.fail("leaving the model", error)
    return worker.finish(state, last)


def _sent(losses: dict[int, Loss]) -> dict[int, Callable[[], float]]:
    """Losses on their way to the host, all in one copy a device; those that are already are not sent again."""
    readers = {step: loss for step, loss in losses.items() if callable(loss)}
    by_device: dict[torch.device, dict[int, Tensor]] = {}
    for step, loss in losses.items():
        if not callable(loss):
            number = torch.as_tensor(loss, dtype=torch.float64)
            by_device.setdefault(number.device, {})[step] = number.mean()
    for together in by_device.values():
        arrived = sent_home(torch.stack(list(together.values())))
        readers |= {step: partial(_number, arrived, number) for number, step in enumerate(together)}
    return readers


def _number(arrived: Callable[[], Tensor], number: int) -> float:
    return float(arrived()[number])


def state_of(error: BaseException | None) -> str:
    """How a training ended, by what was raised."""
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return "ended"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
