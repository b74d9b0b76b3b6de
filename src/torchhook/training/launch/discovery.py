"""Finds out what a script trains, without its help.

From the moment an optimizer is created until its first step, every module that is called with gradients enabled is
noted. A module that is not inside another one and holds parameters of an optimizer is watched from this first call on,
so that nothing of the first step is missed. When the optimizer begins to step, the outermost of all noted modules are
what it trains. The tensor on which `backward` is called between two steps is the loss. Hooks on all modules are there
for that time only. Later there is one hook on the steps of optimizers; when one steps that was not seen when it was
created, modules are noted again until its next step.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial, wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchhook.core.compiled import tracing
from torchhook.core.errors import StopTraining
from torchhook.core.findings import Report
from torchhook.core.hooks.registration import on_any_call, on_any_step
from torchhook.core.text import warn
from torchhook.core.torch_internals import forward_pre_hooks, is_transformed
from torchhook.rules.loss_graph import leaves_of, terms_arriving
from torchhook.rules.registry import Choice, chosen
from torchhook.stats.optimizer.steps import is_inside_a_step
from torchhook.training.launch.by_hand import HandTraining, Suspicion
from torchhook.training.launch.feeding import Feeders
from torchhook.training.launch.patches import patched, unwarned
from torchhook.training.launch.schedules import Schedules
from torchhook.training.launch.tensors import Tensors, named
from torchhook.training.launch.trainings import Training
from torchhook.training.monitor import Monitor, OnFinding, Terms, state_of
from torchhook.training.process import rank, world_size
from torchhook.training.runs.folders import delete

_ATTEMPTS = 20  # steps of an optimizer until we stop waiting for its modules to be called
_FLEETING = 3  # steps: a training of fewer is an inner loop, unless there is no other
_FLEETINGS = 5  # such trainings after which a new one is watched only once it has lasted longer
_STALE = 3  # steps without a gradient after which an optimizer is that of another model
_PATIENCE = 100  # steps of other optimizers during which we look for the modules of an unknown one
_IDLE = 1000  # steps of other optimizers after which a training is over
_WATCHED = 8  # models of one optimizer that are watched, at most
_BACKWARDS = 1000  # losses that are kept between two steps, at most
_LONELY = 8  # backwards of which an optimizer may make one step before we ask whether the script trains by hand
_SEARCHES = 3  # times that all modules of the process are searched for parameters of which none was called, at most


class Discovery:
    """Watches everything that is trained in this process, while it is entered."""

    def __init__(
        self,
        every: int = 10,
        rules: Sequence[Choice] | None = None,
        ignore: Sequence[Choice] = (),
        per_module: Mapping[str, Sequence[str]] | None = None,
        to: Path = Path("runs"),
        name: str = "run",
        on_finding: OnFinding | None = None,
    ) -> None:
        self.watched: list[Monitor] = []
        self._name = name
        self._options: dict[str, Any] = {
            "every": every,
            "rules": rules,
            "ignore": ignore,
            "per_module": per_module,
            "to": [to],
            "on_finding": on_finding,
        }
        self._called: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()  # in the order of calls
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the parts of those that were called
        self._trainings: list[Training] = []
        self._brief: list[Monitor] = []  # of trainings that were over after a few steps
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # of all optimizers so far
        self._roots: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
        self._bare: weakref.WeakKeyDictionary[Optimizer, Tensors] = weakref.WeakKeyDictionary()  # those of no module
        self._by_hand: list[HandTraining] = []
        self._suspicion: Suspicion | None = None  # backwards that may be a training without an optimizer
        self._has_stepped = self._is_unfounded = False
        self._lonely = 0  # backwards where there is an optimizer, but none has ever stepped
        self._searches = 0
        self._feeders, self._schedules = Feeders(), Schedules()
        self._losses: deque[Tensor] = deque(maxlen=_BACKWARDS)
        self._before: list[Tensor] = []  # losses from before the step began
        self._terms: list[Terms] = []  # what they compare
        self._patience = 0  # for how many more steps modules are noted
        self._is_broken = False
        self._process = os.getpid()
        self._always = ExitStack()
        self._looking = ExitStack()

    @property
    def is_main(self) -> bool:
        """Whether this process is alone, or the first of several that train together."""
        return rank() == 0

    def __enter__(self) -> Discovery:
        self._always.enter_context(unwarned("Using `torch.compile.* when there are global hooks on modules"))
        for handle in on_any_step(self._guarded(self._begun), self._guarded(self._stepped)):
            self._always.callback(handle.remove)
        self._always.enter_context(patched(Optimizer, "__init__", after=self._guarded(self._made)))
        self._always.enter_context(patched(torch.autograd, "backward", before=self._guarded(self._backward)))
        self._always.enter_context(self._feeders.seen(self._guarded))
        self._always.enter_context(self._schedules.seen(self._guarded))
        self._always.enter_context(patched(torch.amp.GradScaler, "update", after=self._guarded(self._updated)))
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look_no_more()
        self._always.close()
        for hand in self._by_hand:
            hand.close()
        for training in [training for training in self._trainings if not training.has_begun]:
            self._drop(training)
        for training in self._trainings:
            training.close(state_of(error))
        for monitor in self.watched:
            monitor.close(state_of(error))
        self._brief += [training.monitor for training in self._trainings if training.steps < _FLEETING]
        if len(self._brief) < len(self.watched):
            for monitor in self._brief:
                self._forget_monitor(monitor)
        self._trainings, self._by_hand = [], []

    def _look(self) -> None:
        """Note the modules that are called, from now on."""
        if not self._patience:
            self._called.clear()
            self._inner.clear()
            self._looking.callback(on_any_call(self._guarded(self._note)).remove)
        self._patience = _PATIENCE

    def _look_no_more(self) -> None:
        self._patience = 0
        self._looking.close()

    def _made(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """An optimizer was created: a module that is called from now on may be what it trains."""
        self._steps[optimizer] = 0
        self._look()

    def _note(self, module: nn.Module, args: Any) -> None:
        """A module is called; if it is what an optimizer trains, it is watched from now on."""
        if not torch.is_grad_enabled() or module in self._called:
            return
        self._called[module] = None
        if module in self._inner or is_transformed() or len(self._brief) >= _FLEETINGS:
            return
        self._inner.update(part for part in module.modules() if part is not module)
        optimizer = self._trainer_of(module)
        if optimizer is None or sum(training.optimizer() is optimizer for training in self._trainings) >= _WATCHED:
            return
        before = set(forward_pre_hooks(module))
        self._watch(module, optimizer)
        for number, hook in list(forward_pre_hooks(module).items()):
            if number not in before:  # torch has its list of those to call by now
                hook(module, args, {})

    def _trainer_of(self, module: nn.Module) -> Optimizer | None:
        """The optimizer that has not stepped yet and holds most of the parameters of an unwatched module."""
        if any(training.model() is module for training in self._trainings):
            return None
        own = {id(parameter) for parameter in module.parameters()}
        new = [optimizer for optimizer, steps in self._steps.items() if not steps]
        shares = {optimizer: len(own & _held(optimizer)) for optimizer in new}
        best = max(shares, key=shares.__getitem__, default=None)
        return best if best is not None and shares[best] else None

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """A backward begins; the tensors that it starts from are the loss, or parts of it."""
        self._forget()
        several = (tensors,) if isinstance(tensors, Tensor) else tensors
        losses = [tensor for tensor in several if isinstance(tensor, Tensor) and tensor.numel() == 1]
        values = [loss.detach().reshape(()).clone() for loss in losses]
        self._losses += values
        for training in self._trainings:
            training.notes.backward(losses)
        self._dissect(losses)
        if not self._has_stepped:
            self._suspect(losses, values)

    def never_stepped(self) -> Report | None:
        """The report on a script with an optimizer that never takes a step, and many backwards that change nothing."""
        if self.watched or self._lonely < _LONELY or not self._is_unfounded:
            return None
        rule = next(rule for rule in chosen(["TH503"]) if rule.code == "TH503")
        message = "optimizer.step() is never called: there are backwards and an optimizer, but nothing is trained"
        model = next((type(module).__name__ for module in self._called), "model")
        return Report((rule.finding(message, cause="loop"),), model=model)

    def _dissect(self, losses: list[Tensor]) -> None:
        """Take the loss apart before its backward frees the graph; not with several trainings, which may share it."""
        if len(self._steps) == 1 and any(training.notes.looks for training in self._trainings):
            self._terms += [terms_arriving(loss) for loss in losses]

    def _suspect(self, losses: list[Tensor], values: list[Tensor]) -> None:
        """A backward begins where no optimizer has ever stepped; the script may train by hand."""
        if self._steps and self._lonely < _LONELY:  # it accumulates, as far as we know
            self._lonely += 1
            return
        if self._suspicion is None and not self._by_hand and not self._is_unfounded:
            leaves = leaves_of(losses)
            roots = _largest(_holding(set(map(id, leaves)), self._called))
            self._suspicion = Suspicion(roots, leaves) if leaves else None
        elif self._suspicion is not None and self._suspicion.has_changed(lambda: leaves_of(losses)):
            self._watch_by_hand(self._suspicion, losses)
        for hand in self._by_hand:
            hand.backward(losses, values)
        if self._suspicion is not None:
            self._suspicion.losses += values
            if self._suspicion.is_unfounded:
                self._suspicion, self._is_unfounded = None, True
                self._look_no_more()

    def _watch_by_hand(self, suspicion: Suspicion, losses: list[Tensor]) -> None:
        """Begin to watch what is trained without an optimizer, in its second step."""
        self._suspicion = None
        self._look_no_more()
        for training in [known for known in self._trainings if known.model() in suspicion.roots]:
            self._drop(training)
        roots = suspicion.roots or [Tensors(named(leaves_of(losses)))]
        for root, rest in zip(roots, suspicion.rests, strict=True):
            monitor = self._monitor(root, None, 0)
            if monitor is not None:
                monitor.wait(rest)
                self._by_hand.append(HandTraining(root, monitor, suspicion, self._guarded))

    def _updated(self, *args: Any, **kwargs: Any) -> None:
        """A GradScaler was updated; losses that are left belong to a step that it skipped."""
        self._losses.clear()
        self._terms.clear()

    def _begun(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer begins to step; backwards from now on come from its closure, which it may call several times."""
        if is_inside_a_step():  # an optimizer may call the step of its parent class
            return
        self._before = list(self._losses)
        self._losses.clear()
        self._has_stepped = True
        self._end_by_hand()
        is_first = not self._steps.setdefault(optimizer, 0)
        if is_first or not self._own(optimizer):
            self._meet(optimizer)
        for training in self._own(optimizer):
            training.notes.schedules = self._schedules.of(optimizer)
            training.notes.stepping()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if is_inside_a_step():
            return
        self._steps[optimizer] += 1
        losses = [*self._before, *list(self._losses)[-1:]]
        self._losses.clear()
        terms, self._terms = self._terms, []
        drawn = self._feeders.drawn()
        for training in self._trainings:
            training.idle += 1
            if losses and training.optimizer() is not optimizer:
                training.notes.rival_stepped()
        for training in self._own(optimizer):
            training.step(losses, terms, drawn)
        self._patience = max(self._patience - 1, 0)
        if not self._patience or all(known in self._roots for known in self._steps):
            self._look_no_more()

    def _end_by_hand(self) -> None:
        for hand in self._by_hand:
            hand.close()
            hand.monitor.close()
        self._by_hand, self._suspicion = [], None

    def _own(self, optimizer: Optimizer) -> list[Training]:
        return [training for training in self._trainings if training.optimizer() is optimizer]

    def _meet(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, for the first time or without a monitor."""
        if len(self._brief) >= _FLEETINGS and self._steps[optimizer] < _FLEETING:
            return
        if optimizer not in self._roots:
            self._find(optimizer)
        roots = [found for known in self._roots.get(optimizer, ()) if (found := known()) is not None]
        for root in roots:
            training = next((training for training in self._trainings if training.model() is root), None)
            if training is not None and training.optimizer() is optimizer:
                continue
            if training is not None and not training.has_begun:  # another one was expected to train it
                self._drop(training)
            elif training is not None and training.is_replaced():
                self._end(training)
            elif training is not None:  # they may alternate, and watching one of them is enough
                continue
            self._watch(root, optimizer, is_late=True)
        for training in self._own(optimizer):
            if roots and not training.has_begun and training.model() not in roots:  # it is a part of one of them
                self._drop(training)

    def _find(self, optimizer: Optimizer) -> None:
        """Find out what an optimizer trains; if that is not clear yet, try again before its next step."""
        if not self._patience:
            self._look()
            return
        held = _held(optimizer)
        is_late = self._steps[optimizer] >= _ATTEMPTS
        roots = _holding(held, self._called) or (_holding(held, _all_modules()) if is_late else [])
        if not roots and self._steps[optimizer] >= _STALE and not _has_gradient(optimizer):
            roots = self._untrained()
        if not roots and (is_late or self._is_bare(optimizer)):
            roots = [self._stand_in(optimizer)]
        if roots:
            self._roots[optimizer] = [weakref.ref(root) for root in _largest(roots)]

    def _is_bare(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer trains tensors that are in no module, as far as that is known yet."""
        if not _has_gradient(optimizer):
            return False
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(isinstance(parameter, nn.Parameter) for parameter in held):
            return True
        self._searches += 1
        return self._searches <= _SEARCHES and not _holding(_held(optimizer), _all_modules())

    def _untrained(self) -> list[nn.Module]:
        """The models that get gradients but are in no optimizer: theirs may be one that has other parameters."""
        held = {known for optimizer in self._steps for known in _held(optimizer)}
        models = [root for root in outermost(self._called) if any(p.grad is not None for p in root.parameters())]
        return [root for root in models if not any(id(parameter) in held for parameter in root.parameters())]

    def _stand_in(self, optimizer: Optimizer) -> nn.Module:
        """A module that stands for the tensors of an optimizer."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._bare[optimizer] = Tensors(named(held))
        return self._bare[optimizer]

    def _watch(self, root: nn.Module, optimizer: Optimizer, is_late: bool = False) -> None:
        """Begin to watch a model; `is_late` if its forward is over, so that its next step is the first to measure."""
        weak = weakref.proxy(optimizer)  # the training is over when the script drops its optimizer
        monitor = self._monitor(root, weak, self._steps[optimizer])
        if monitor is None:
            self._roots[optimizer] = []  # do not try again
            return
        if is_late:
            monitor.wait()
        training = Training(root, optimizer, monitor, self._guarded)
        training.notes.others = partial(self._held_by_others, training)
        self._trainings.append(training)

    def _held_by_others(self, training: Training) -> set[int]:
        """The ids of the parameters that other optimizers have."""
        own = training.optimizer()
        return {known for optimizer in list(self._steps) if optimizer is not own for known in _held(optimizer)}

    def _monitor(self, root: nn.Module, optimizer: Any, first_step: int) -> Monitor | None:
        name = f"{self._name}-{type(root).__name__}" if self.watched else self._name
        try:
            monitor = Monitor(root, optimizer, name=name, first_step=first_step, **self._options)
        except Exception as error:
            _warn(f"could not watch {type(root).__name__}: {type(error).__name__}: {error}")
            return None
        monitor.tells = False  # the launcher does
        self.watched.append(monitor)
        return monitor

    def _forget(self) -> None:
        """End the trainings that are over. (Not from a finalizer of the optimizer, which may run at any point.)"""
        for training in list(self._trainings):
            if training.optimizer() is None or training.idle > _IDLE:
                self._end(training)

    def _end(self, training: Training) -> None:
        if not training.has_begun:
            self._drop(training)
            return
        training.close()
        self._trainings.remove(training)
        if training.steps < _FLEETING:
            self._brief.append(training.monitor)

    def _drop(self, training: Training) -> None:
        """Forget a training that never took a step."""
        training.close()
        self._trainings.remove(training)
        self._forget_monitor(training.monitor)

    def _forget_monitor(self, monitor: Monitor) -> None:
        self.watched.remove(monitor)
        if monitor.run is not None and world_size() == 1:  # other ranks may still write below it
            delete(monitor.run)

    def _guarded(self, action: Callable[..., None]) -> Callable[..., None]:
        """A fault of ours must not stop the script."""

        @wraps(action)
        def guarded(*args: Any, **kwargs: Any) -> None:
            if tracing() or self._is_broken or os.getpid() != self._process:
                return
            try:
                action(*args, **kwargs)
            except StopTraining:
                raise
            except Exception as error:
                self._is_broken = True  # hooks cannot be removed while they are called
                _warn(f"torchhook stopped looking for what is trained: {type(error).__name__}: {error}")

        return guarded


def outermost(called: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that no other of them contains.

    >>> inner = nn.Linear(2, 2)
    >>> outer = nn.Sequential(inner, nn.ReLU())
    >>> outermost([inner, outer]) == [outer]
    True
    """
    modules = list(called)
    inside = {child for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if module not in inside]


def _held(optimizer: Optimizer) -> set[int]:
    """The ids of the parameters that an optimizer has."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def _holding(held: set[int], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost of `modules` that have one of the parameters with the ids in `held`."""
    return [root for root in outermost(modules) if any(id(parameter) in held for parameter in root.parameters())]


def _all_modules() -> list[nn.Module]:
    """All modules in this process, since hooks do not see the calls inside a compiled graph."""
    return [known for known in gc.get_objects() if issubclass(type(known), nn.Module)]


def _largest(roots: list[nn.Module]) -> list[nn.Module]:
    """The largest of too many roots, which are layers that a function calls one by one rather than models."""
    if len(roots) <= _WATCHED:
        return roots
    _warn(f"an optimizer trains {len(roots)} separate modules; only the {_WATCHED} largest are watched")
    sizes = {root: sum(parameter.numel() for parameter in root.parameters()) for root in roots}
    largest = sorted(roots, key=lambda root: -sizes[root])[:_WATCHED]
    return [root for root in roots if root in largest]


def _warn(message: str) -> None:
    """Warn, but never raise: a warning that is an error would stop the script."""
    with suppress(UserWarning):
        warn(message)
