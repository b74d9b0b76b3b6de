"""A `Watch` sits beside a training and writes its history: step by step, what the chosen rules need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from torchhook.core.event import Event
from torchhook.core.selection import Query, Selector
from torchhook.core.session import Session
from torchhook.core.site import Port, Site
from torchhook.core.tap import Tap
from torchhook.rules.history import History, joined
from torchhook.rules.kinds import kind_of
from torchhook.rules.rest import at_rest
from torchhook.rules.rule import Need, Rule
from torchhook.sinks.clock import Clock
from torchhook.sinks.reduce import Reduce
from torchhook.stats import Attention, Covariance, Stat, named
from torchhook.stats.reading import FLAGS
from torchhook.stepping.steps import Steps
from torchhook.watching.attention import Attending

_HEAVY: dict[str, Stat] = {"covariance": Covariance(), "attention": Attention()}
_WIDEST = 512  # units of which a covariance is not too large
_MODULES: dict[str, Port] = {"input": "input", "output": "output", "grad_output": "grad_output"}


class Watch:
    """Measures what `rules` need, and ends a window at every `step`.

    Covariances and attention are too dear for every step: they are measured while the watch is `thorough`.

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
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.history = history or History(rest=at_rest(model, optimizer), own_optimizer=optimizer is not None)
        self.steps = 0
        self.is_thorough = False
        self._needs = {*needs, *(need for rule in rules for need in (*rule.needs, *rule.uses))}
        self._clock = Clock(by_passes=optimizer is None)
        self._always = ExitStack()
        self._thorough = ExitStack()
        self._attention = ExitStack()
        self._steps: Steps | None = None
        self._light: list[Reduce] = []
        self._heavy: list[Reduce] = []

    def __enter__(self) -> Watch:
        stepped = {FLAGS[need.port] for need in self._needs if FLAGS.get(need.port) in _STEPPED}
        taps = self._sites(heavy=False)
        if stepped and self.optimizer is not None and self._is_ours():
            flags = {flag: flag in stepped for flag in _STEPPED}
            self._steps = Steps(self.optimizer, self._reduce(), Selector.of(""), **flags)
            taps += self._steps.taps(None)
        elif "param_grads" in stepped and any(parameter.requires_grad for parameter in self.model.parameters()):
            taps.append(Tap("", self._reduce(), "param_grad"))
        with ExitStack() as opened:
            session = Session(self.model, taps, on_silent="ignore").attach()
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
        """Measure, or no longer measure, what is too dear for every step: all of it goes into one window."""
        if wanted == self.is_thorough:
            return
        self.is_thorough = wanted
        if wanted:
            taps = self._sites(heavy=True)
            self._thorough.callback(Session(self.model, taps, on_silent="ignore").attach().abandon)
            if any(need.port == "attention" for need in self._needs):
                self._attend()
            return
        self._attention.close()
        self._thorough.close()
        if self.history.windows:
            step, window = self.history.windows.pop()
            self.history.add(step, joined([window, *(reduce.snapshot() for reduce in self._heavy)]))
        self._heavy.clear()

    def step(self, loss: Tensor | float | None = None) -> None:
        """A step of the training is over, and its window with it."""
        window = joined(reduce.snapshot() for reduce in self._light)
        for reduce in self._light:
            reduce.reset()
        self.history.add(self.steps, window, None if loss is None else float(loss))
        self.history.scaled |= self._steps is not None and self._steps.scaler is not None
        if self.optimizer is not None:
            rates = [float(group["lr"]) for group in self.optimizer.param_groups if group.get("lr") is not None]
            self.history.rates[self.steps] = max(rates, default=0.0)
        self.steps += 1
        self._attention.close()  # one step tells enough

    def _sites(self, heavy: bool) -> list[Tap]:
        """What has to be seen of modules."""
        taps = []
        for (port, kinds), stats in _grouped(self._needs, heavy).items():
            test = _of_kinds(kinds, _WIDEST if heavy else None)
            paths = [path for path, module in self.model.named_modules() if test(path, module)]
            if paths:  # the model itself is found by its name alone
                where = Selector.of(test if any(paths) else "")
                taps.append(Tap(where, self._reduce(*stats, heavy=heavy), port))
        return taps

    def _is_ours(self) -> bool:
        """Whether the optimizer trains anything of the model."""
        own = {id(parameter) for parameter in self.model.parameters()}
        return any(id(p) in own for group in self.optimizer.param_groups for p in group["params"])

    def _reduce(self, *stats: Stat, heavy: bool = False) -> Reduce:
        reduce = Reduce(*stats, clock=self._clock)
        (self._heavy if heavy else self._light).append(reduce)
        return reduce

    def _attend(self) -> None:
        """Look at attention until the step ends."""
        reduce = self._reduce(_HEAVY["attention"], heavy=True)
        running: list[tuple[str, nn.Module]] = []  # the modules inside of which we are

        def enter(event: Event) -> None:
            running.append((event.path, event.module))

        def leave(event: Event) -> None:
            running.pop()

        def tell(logits: Tensor) -> None:
            path, module = running[-1] if running else ("", self.model)
            reduce.cell(Site(path, "attention"), module).update(logits)  # type: ignore[arg-type]  # a place, not a port

        modules: list[Query] = ["", *([_below] if next(self.model.children(), None) is not None else [])]
        everything = Selector.union(modules)
        taps = [Tap(everything, enter, "input"), Tap(everything, leave, "output")]
        self._attention.callback(Session(self.model, taps, on_silent="ignore").attach().abandon)
        self._attention.enter_context(Attending(tell))


_STEPPED = ("params", "param_grads", "updates")


def _below(path: str, module: nn.Module) -> bool:
    return bool(path)


def _grouped(needs: Iterable[Need], heavy: bool) -> dict[tuple[Port, frozenset[str]], list[Stat]]:
    """The statistics to collect at each port of modules, by the kinds of those; no kinds: of every leaf."""
    kinds_of: dict[tuple[Port, str], list[tuple[str, ...]]] = {}
    for need in needs:
        if need.port in _MODULES and (need.stat in _HEAVY) == heavy:
            kinds_of.setdefault((_MODULES[need.port], need.stat), []).append(need.kinds)
    groups: dict[tuple[Port, frozenset[str]], list[Stat]] = {}
    for (port, stat), kinds in sorted(kinds_of.items()):
        wanted = frozenset(kind for one in kinds for kind in one) if all(kinds) else frozenset[str]()
        groups.setdefault((port, wanted), []).append(_HEAVY.get(stat) or named(stat))
    leaves_first = sorted(groups, key=lambda group: (bool(group[1]), group[0] != "output"))  # they give the order
    return {group: groups[group] for group in leaves_first}


def _of_kinds(kinds: frozenset[str], widest: int | None) -> Callable[[str, nn.Module], bool]:
    """Whether a module is a leaf of one of some kinds, and not too wide."""

    def test(path: str, module: nn.Module) -> bool:
        is_leaf = next(module.children(), None) is None
        is_wanted = not kinds or kind_of(type(module).__name__) in kinds
        width = max(getattr(getattr(module, "weight", None), "shape", ())[:2], default=0)
        return is_leaf and is_wanted and (widest is None or width <= widest)

    return test
