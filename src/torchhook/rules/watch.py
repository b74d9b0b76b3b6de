"""A `Watch` measures, step by step during a training, what the chosen rules need.

Statistics come at three prices. Moments of outputs and gradients are cheap: they are measured in every step of the
clock. Statistics of units, histograms, inputs and updates cost more: if there is a clock `seldom`, they are measured
only in its steps. Covariances and attention are expensive: they are measured only while the watch is thorough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from torchhook.core.call_wrapper import compiled_among
from torchhook.core.event import Event
from torchhook.core.selection import Selector, walk
from torchhook.core.session import ScopeName, Session
from torchhook.core.shards import shards_of_gathered
from torchhook.core.site import Port, Site
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import graph_count
from torchhook.rules.attention import GuardedAttending
from torchhook.rules.history import History, joined
from torchhook.rules.kinds import kind_of
from torchhook.rules.rest import Rest, at_rest
from torchhook.rules.rule import Need, Rule
from torchhook.stats import Attention, Covariance, Moments, Stat, named
from torchhook.stats.clock import Clock
from torchhook.stats.optimizer.steps import Steps
from torchhook.stats.reading import FLAGS, Snapshot
from torchhook.stats.reduce import Reduce

_EXPENSIVE: dict[str, Stat] = {"covariance": Covariance(), "attention": Attention()}
_MODULES: dict[str, Port] = {"input": "input", "output": "output", "grad_output": "grad_output"}


class Watch:
    """Measures what `rules` need. A window ends at every `step`, or when `window` is called.

    >>> import torch
    >>> from torchhook.rules import chosen
    >>> model = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    >>> with Watch(model, chosen(["TH101"])) as watch:
    ...     for _ in range(3):
    ...         model(torch.ones(1, 2)).sum().backward()
    ...         watch.step(loss=0.5)
    >>> watch.history.losses, list(watch.history.whole())
    ({0: 0.5, 1: 0.5, 2: 0.5}, [('0', 'output'), ('1', 'output')])
    """

    def __init__(
        self,
        model: nn.Module,
        rules: Iterable[Rule],
        optimizer: Any = None,
        history: History | None = None,
        needs: Iterable[Need] = (),
        clock: Clock | None = None,
        seldom: Clock | None = None,
        scope: ScopeName = "thread",
        widest: int = 512,
        detours: bool = True,
        on_fault: Callable[[Exception], None] | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.history = history or History(rest=at_rest(model, optimizer), own_optimizer=optimizer is not None)
        self.steps = 0
        self.is_thorough = False
        self._needs = {*needs, *(need for rule in rules for need in (*rule.needs, *rule.uses))}
        self.clock = clock or Clock(by_passes=optimizer is None)
        self.seldom = seldom or self.clock
        self._scope = scope
        self._on_fault = on_fault  # gets the errors of taps, which must not reach the caller of the model
        self._widest = widest  # the most units for which a covariance is measured
        # Whether all objects may be searched for a GradScaler, and attention inspected: it is then computed
        # differently, not bit-equal, and by a mode that a forward which raises would leave on torch's stack of modes.
        self._detours = detours
        self._graphs = graph_count()  # later graphs may be of this model
        self.session: Session | None = None  # the one that measures throughout
        self._always = ExitStack()
        self._thorough = ExitStack()
        self._attention = ExitStack()
        self._steps: Steps | None = None
        self._reduces: list[Reduce] = []
        self._expensive: list[Reduce] = []
        self._ended = {clock: clock.ended for clock in (self.clock, self.seldom)}  # at the end of the last window

    def __enter__(self) -> Watch:
        stepped = {FLAGS[need.port] for need in self._needs if FLAGS.get(need.port) in _STEPPED}
        seldom = {need for need in self._needs if self.seldom is not self.clock and _is_costly(need)}
        taps = [*self._taps(self._needs - seldom, self.clock), *self._taps(seldom, self.seldom)]
        if stepped and self.optimizer is not None and self._is_ours():
            flags = {flag: flag in stepped for flag in _STEPPED}
            own = self._reduce(self.clock)
            self._steps = Steps(
                self.optimizer,
                own,
                Selector.of(""),
                **flags,
                norms_alone=True,
                seldom=self.seldom,
            )
            taps += self._steps.taps(None)
        elif "param_grads" in stepped and any(parameter.requires_grad for parameter in self.model.parameters()):
            taps.append(Tap("", self._reduce(self.clock), "param_grad"))
        with ExitStack() as opened:
            session = self.session = self._session(taps).open()
            opened.callback(session.abandon)
            if self._steps is not None:
                opened.callback(self._steps.detach)
                self._steps.attach(session)
            self._always = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._always:
            self.be_thorough(False)

    def be_thorough(self, wanted: bool) -> None:
        """Start or stop measuring expensive statistics; they are all added to the last window."""
        if wanted == self.is_thorough:
            return
        if wanted:
            self.begin_thorough()
        elif self.history.windows:
            step, window = self.history.windows.pop()
            self.history.add(step, joined([window, self.end_thorough()]))
        else:
            self.end_thorough()

    def begin_thorough(self) -> None:
        """Start measuring expensive statistics, except in compiled models, which would have to be recompiled."""
        self.is_thorough = True
        if compiled_among(self.model.modules()) or graph_count() > self._graphs:
            return
        taps = self._taps(self._needs, self.clock, expensive=True)
        self._thorough.callback(self._session(taps).open().abandon)
        if self._detours and any(need.port == "attention" for need in self._needs):
            self._inspect_attention()

    def end_thorough(self) -> Snapshot:
        """Stop measuring expensive statistics, and return them."""
        expensive = list(self._expensive)
        self.forget_thorough()
        return joined(reduce.snapshot() for reduce in expensive)

    def forget_thorough(self) -> None:
        """Stop measuring expensive statistics, and drop them."""
        self.is_thorough = False
        self._attention.close()
        self._thorough.close()
        self._expensive.clear()

    def step(self, loss: Tensor | float | None = None) -> None:
        """End a step of the training, and its window."""
        self.history.add(self.steps, self._taken(self._reduces), None if loss is None else float(loss))
        self.history.scaled |= self.is_scaled
        if self.optimizer is not None:
            self.history.rates[self.steps] = self.rate() or 0.0
        self.steps += 1
        self._attention.close()  # one step is enough

    def window(self) -> Snapshot:
        """End a window and return it; this does not wait for the device, only reading its values does."""
        new = {clock for clock, ended in self._ended.items() if clock.ended > ended}
        self._ended = {clock: clock.ended for clock in self._ended}
        return self._taken([reduce for reduce in self._reduces if reduce.clock in new])

    def count_step(self) -> None:
        """Count a step, unless the optimizer is watched, whose steps are counted anyway."""
        if self._steps is None:
            self.clock.advance()

    @property
    def sees_steps(self) -> bool:
        """Whether the steps of the optimizer are seen; else `count_step` has to be called."""
        return self._steps is not None

    def rate(self) -> float | None:
        """The largest learning rate; None if there is none, or it would have to be fetched from the device."""
        largest = None
        for group in () if self.optimizer is None else self.optimizer.param_groups:
            rate = group.get("lr")
            if rate is None or (isinstance(rate, Tensor) and rate.device.type != "cpu"):
                continue
            largest = float(rate) if largest is None else max(largest, float(rate))
        return largest

    def unscaled(self, loss: Tensor) -> Tensor:
        """The loss before a GradScaler scaled it."""
        return loss if self._steps is None else self._steps.unscaled(loss)

    def rest(self) -> Rest:
        """The current state of the model, and of its optimizer unless that is gone."""
        try:
            return at_rest(self.model, self.optimizer)
        except ReferenceError:
            return at_rest(self.model)

    @property
    def is_scaled(self) -> bool:
        """Whether a GradScaler is in use."""
        return self._steps is not None and self._steps.scaler is not None

    def _taken(self, reduces: list[Reduce]) -> Snapshot:
        window = joined(reduce.snapshot() for reduce in reduces)
        for reduce in reduces:
            reduce.reset()
        return window

    def _taps(self, needs: Iterable[Need], clock: Clock, expensive: bool = False) -> list[Tap]:
        """The taps on modules that measure these needs."""
        taps = []
        for (port, kinds), stats in _grouped(needs, expensive).items():
            test = _of_kinds(kinds, self._widest if expensive else None, self._detours)
            paths = [path for path, module in walk(self.model) if test(path, module)]
            if paths:  # a predicate never selects the model itself, only its name does
                where = Selector.of(test if any(paths) else "")
                taps.append(Tap(where, self._reduce(clock, *stats, expensive=expensive), port))
        return taps

    def _is_ours(self) -> bool:
        """Whether the optimizer has parameters of the model; while FSDP computes, others are in their place."""
        shards = shards_of_gathered(self.model)
        own = {id(shards.get(id(parameter), parameter)) for parameter in self.model.parameters()}
        return any(id(p) in own for group in self.optimizer.param_groups for p in group["params"])

    def _session(self, taps: list[Tap]) -> Session:
        when = None if self.clock.by_passes else self.clock  # a clock that counts passes has to see all of them
        return Session(self.model, taps, scope=self._scope, on_silent="ignore", on_fault=self._on_fault, when=when)

    def _reduce(self, clock: Clock, *stats: Stat, expensive: bool = False) -> Reduce:
        reduce = Reduce(*stats, clock=clock)
        (self._expensive if expensive else self._reduces).append(reduce)
        return reduce

    def _inspect_attention(self) -> None:
        """Measure attention logits until the step ends."""
        reduce = self._reduce(self.clock, _EXPENSIVE["attention"], expensive=True)
        running: list[tuple[str, nn.Module]] = []  # the modules whose forward is running, innermost last

        def enter(event: Event) -> None:
            running.append((event.path, event.module))

        def leave(event: Event) -> None:
            running.pop()

        def receive(logits: Tensor) -> None:
            path, module = running[-1] if running else ("", self.model)
            reduce.cell(Site(path, "attention"), module).update(logits)  # type: ignore[arg-type]  # not a port of a module

        def is_part(path: str, module: nn.Module) -> bool:
            return bool(path)

        everything = Selector.union(["", *([is_part] if any(is_part(*place) for place in walk(self.model)) else [])])
        taps = [Tap(everything, enter, "input"), Tap(everything, leave, "output")]
        self._attention.callback(self._session(taps).open().abandon)
        self._attention.enter_context(GuardedAttending(receive))


_STEPPED = ("params", "param_grads", "updates")


def _is_costly(need: Need) -> bool:
    """Whether a statistic costs too much for every measured step."""
    return need.stat != Moments.name or need.port == "input"


def _grouped(needs: Iterable[Need], expensive: bool) -> dict[tuple[Port, frozenset[str]], list[Stat]]:
    """The statistics to measure, by port and kinds of modules; no kinds means every leaf."""
    kinds_of: dict[tuple[Port, str], list[tuple[str, ...]]] = {}
    for need in needs:
        if need.port in _MODULES and (need.stat in _EXPENSIVE) == expensive:
            kinds_of.setdefault((_MODULES[need.port], need.stat), []).append(need.kinds)
    groups: dict[tuple[Port, frozenset[str]], list[Stat]] = {}
    for (port, stat), kinds in sorted(kinds_of.items()):
        wanted = frozenset(kind for one in kinds for kind in one) if all(kinds) else frozenset[str]()
        groups.setdefault((port, wanted), []).append(_EXPENSIVE.get(stat) or named(stat))
    # Outputs of all leaves come first: they define the order of execution.
    leaves_first = sorted(groups, key=lambda group: (bool(group[1]), group[0] != "output"))
    return {group: groups[group] for group in leaves_first}


def _of_kinds(kinds: frozenset[str], widest: int | None, detours: bool) -> Callable[[str, nn.Module], bool]:
    """A test whether a module is a leaf of one of these kinds, and not too wide."""

    def test(path: str, module: nn.Module) -> bool:
        is_wanted = not kinds or kind_of(type(module).__name__) in kinds
        return is_wanted and is_leaf(module, detours) and (widest is None or _width(module) <= widest)

    return test


def is_leaf(module: nn.Module, detours: bool) -> bool:
    """Whether no module is called inside; without `detours`, attention does not call its own projection."""
    if not detours and isinstance(module, (nn.MultiheadAttention, NonDynamicallyQuantizableLinear)):
        return isinstance(module, nn.MultiheadAttention)
    return next(module.children(), None) is None


def _width(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return 0 if weight is None or is_lazy(weight) else max(getattr(weight, "shape", ())[:2], default=0)
