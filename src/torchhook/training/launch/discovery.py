"""Finds out what a script trains, without its help.

From the moment an optimizer is created until its first step, every module that is called with gradients enabled is
noted. A module that is not inside another one and holds parameters of an optimizer is watched from this first call on,
so that nothing of the first step is missed. When the optimizer begins to step, the outermost of all noted modules are
what it trains. The tensor on which `backward` is called between two steps is the loss. Hooks on all modules are there
for that time only. Later there is one hook on the steps of optimizers; when one steps that was not seen when it was
created, modules are noted again until its next step.

Several threads may train at the same time. Models and optimizers are known to all of them, and belong together by their
parameters. What happens between two steps belongs to the thread in which it happens, its lane. An optimizer belongs to
the lane in which it stepped last. A thread without an optimizer works for others: each of its backwards counts for the
optimizer that has the parameters, and its batches for the training, if there is only one. Once a thread does both, as
in a pool, every backward is told apart like that.
"""

from __future__ import annotations

import os
import threading
import weakref
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
from torchhook.core.instances import instances
from torchhook.core.text import warn
from torchhook.core.torch_internals import forward_pre_hooks, is_transformed
from torchhook.rules.loss_graph import leaves_of, terms_arriving
from torchhook.rules.registry import Choice, chosen
from torchhook.stats.optimizer.steps import is_inside_a_step
from torchhook.training.launch.by_hand import HandTraining, Suspicion
from torchhook.training.launch.feeding import Feeders
from torchhook.training.launch.lanes import Lane
from torchhook.training.launch.patches import patched, unwarned
from torchhook.training.launch.schedules import Schedules
from torchhook.training.launch.tensors import Tensors, named
from torchhook.training.launch.trainings import Training
from torchhook.training.monitor import Monitor, OnFinding, state_of
from torchhook.training.process import rank, world_size
from torchhook.training.runs.folders import delete

_ATTEMPTS = 20  # steps of an optimizer until we stop waiting for its modules to be called
_FLEETING = 3  # steps: a training of fewer is an inner loop, unless there is no other
_FLEETINGS = 5  # such trainings after which a new one is watched only once it has lasted longer
_STALE = 3  # steps without a gradient after which an optimizer is that of another model
_PATIENCE = 100  # steps of other optimizers during which we look for the modules of an unknown one
_ELSEWHERE = 0.01  # of such a step, if it is in another thread
_IDLE = 1000  # steps of other optimizers after which a training is over
_WATCHED = 8  # models of one optimizer that are watched, at most
_ENDED = 64  # threads that ended after backwards, and whose losses are kept until an optimizer steps
_LONELY = 8  # backwards of which an optimizer may make one step before we ask whether the script trains by hand
_SEARCHES = 3  # times that all modules of the process are searched for parameters of which none was called, at most


class KnownOptimizer:
    """What is known of an optimizer."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane  # in which it stepped last, or else in which its model was called, or it was created
        self.steps = 0
        self.roots: list[weakref.ref[nn.Module]] | None = None  # what it trains
        self.bare: Tensors | None = None  # what stands for the tensors that it trains
        self.patience: float = _PATIENCE  # for how many more steps its modules are looked for

    @property
    def is_unclear(self) -> bool:
        """Whether we look for its modules."""
        return self.roots is None and self.patience > 0


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
        price: float | None = 0.02,
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
            "price": price,
        }
        self._called: weakref.WeakKeyDictionary[nn.Module, Lane] = weakref.WeakKeyDictionary()  # in the order of calls
        self._inner: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the parts of those that were called
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, KnownOptimizer] = weakref.WeakKeyDictionary()
        self._trainings: list[Training] = []
        self._brief: list[Monitor] = []  # of trainings that were over after a few steps
        self._by_hand: list[HandTraining] = []
        self._lanes: list[Lane] = []
        self._here = threading.local()  # has the lane of each thread
        self._lock = threading.RLock()  # for what threads share; reentrant, since collecting garbage may call us
        self._wanders = False  # whether a thread that trains runs backwards for others, too
        self._never_steps = False  # whether many backwards changed nothing, although there is an optimizer
        self._searches = 0
        self._feeders, self._schedules = Feeders(lambda feeder: self._lane().draw(feeder)), Schedules()
        self._is_broken = self._is_looking = False
        self._process = os.getpid()
        self._always = ExitStack()
        self._looking = ExitStack()

    @property
    def is_main(self) -> bool:
        """Whether this process is alone, or the one of several that writes the run for all."""
        return any(monitor.writes for monitor in self.watched) if self.watched else rank() == 0

    def __enter__(self) -> Discovery:
        self._always.enter_context(unwarned("Using `torch.compile.* when there are global hooks on modules"))
        for handle in on_any_step(self._guarded(self._begun), self._guarded(self._stepped)):
            self._always.callback(handle.remove)
        self._always.enter_context(patched(Optimizer, "__init__", after=self._guarded(self._made)))
        self._always.enter_context(patched(torch.autograd, "backward", before=self._guarded(self._backward)))
        self._always.enter_context(self._feeders.seen(self._guarded))
        self._always.enter_context(self._schedules.seen(self._guarded))
        self._always.enter_context(patched(torch.amp.GradScaler, "update", after=self._guarded(self._updated)))
        self._always.enter_context(patched(threading, "excepthook", before=self._guarded(self._raised)))
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
            training.close(state_of(error), error)
        for monitor in self.watched:
            monitor.close(state_of(error), error)
        self._brief += [training.monitor for training in self._trainings if training.steps < _FLEETING]
        if len(self._brief) < len(self.watched):
            for monitor in self._brief:
                self._forget_monitor(monitor)
        self._trainings, self._by_hand = [], []

    def _lane(self) -> Lane:
        """The lane of this thread."""
        lane: Lane | None = getattr(self._here, "lane", None)
        if lane is None:
            lane = self._here.lane = Lane()
            with self._lock:
                ended = [known for known in self._lanes if not known.is_alive and not self._has_optimizer(known)]
                gone = {*ended} - {*[known for known in ended if known.losses][-_ENDED:]}
                self._lanes = [*(known for known in self._lanes if known not in gone), lane]
        return lane

    def _known(self) -> dict[Optimizer, KnownOptimizer]:
        """All optimizers that are alive, and what is known of them."""
        with self._lock:
            return dict(self._optimizers)

    def _modules(self) -> dict[nn.Module, Lane]:
        """The modules that were called, and where that was first."""
        with self._lock:
            return dict(self._called)

    def _has_optimizer(self, lane: Lane) -> bool:
        return any(known.lane is lane for known in self._known().values())

    def _look(self) -> None:
        """Note the modules that are called, from now on."""
        with self._lock:
            if not self._is_looking:
                self._is_looking = True
                self._called.clear()
                self._inner.clear()
                self._looking.callback(on_any_call(self._guarded(self._note)).remove)

    def _look_no_more(self) -> None:
        with self._lock:
            self._is_looking = False
            self._looking.close()

    def _rest(self) -> None:
        """Look no more, unless it is unclear what some optimizer trains."""
        with self._lock:
            if self._is_looking and not any(known.is_unclear for known in self._known().values()):
                self._look_no_more()

    def _made(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """An optimizer was created: a module that is called from now on may be what it trains."""
        known = KnownOptimizer(self._lane())
        with self._lock:
            self._optimizers[optimizer] = known
            self._look()

    def _note(self, module: nn.Module, args: Any) -> None:
        """A module is called; if it is what an optimizer trains, it is watched from now on."""
        if not torch.is_grad_enabled() or module in self._called:
            return
        lane = self._lane()
        with self._lock:
            if self._called.setdefault(module, lane) is not lane or module in self._inner:  # or in another thread
                return
            if is_transformed() or lane.brief >= _FLEETINGS:
                return
            self._inner.update(part for part in module.modules() if part is not module)
        optimizer = self._trainer_of(module)
        if optimizer is None or len(self._own(optimizer)) >= _WATCHED:
            return
        before = set(forward_pre_hooks(module))
        self._watch(module, optimizer)
        for number, hook in list(forward_pre_hooks(module).items()):
            if number not in before:  # torch has its list of those to call by now
                hook(module, args, {})

    def _trainer_of(self, module: nn.Module) -> Optimizer | None:
        """The optimizer that has not stepped yet and holds most of the parameters of an unwatched module."""
        if any(training.model() is module for training in list(self._trainings)):
            return None
        own = {id(parameter) for parameter in module.parameters()}
        new = [optimizer for optimizer, known in self._known().items() if not known.steps]
        shares = {optimizer: len(own & _held(optimizer)) for optimizer in new}
        best = max(shares, key=shares.__getitem__, default=None)
        return best if best is not None and shares[best] else None

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """A backward begins; the tensors that it starts from are the loss, or parts of it."""
        self._forget()
        several = (tensors,) if isinstance(tensors, Tensor) else tensors
        losses = [tensor for tensor in several if isinstance(tensor, Tensor) and tensor.numel() == 1]
        values = [loss.detach().reshape(()).clone() for loss in losses]
        lane = self._lane()
        leaves = self._leaves(lane, losses)
        with self._lock:
            lane.losses += zip(values, leaves, strict=True)
        concerned = self._concerned(lane, leaves)
        for training in concerned:
            training.notes.backward(losses)
        self._dissect(lane, losses, concerned)
        if not lane.has_stepped and all(training.lane is lane for training in concerned):
            self._suspect(lane, losses, values)

    def _leaves(self, lane: Lane, losses: list[Tensor]) -> Sequence[set[int] | None]:
        """The ids of the tensors that each loss depends on; None if what is trained in this thread tells enough."""
        if len(self._lanes) == 1 or (lane.has_stepped and self._has_optimizer(lane) and not self._wanders):
            return [None] * len(losses)
        return [set(map(id, leaves_of([loss]))) for loss in losses]

    def _concerned(self, lane: Lane, leaves: Sequence[set[int] | None]) -> list[Training]:
        """The trainings that a backward belongs to: those of the parameters, if they are known, or of its thread."""
        met = set().union(*filter(None, leaves))
        found = [training for training in list(self._trainings) if met and met & _held(training.optimizer())]
        return found or [training for training in list(self._trainings) if training.lane is lane]

    def never_stepped(self) -> Report | None:
        """The report on a script with an optimizer that never takes a step, and many backwards that change nothing."""
        if self.watched or not self._never_steps:
            return None
        rule = next(rule for rule in chosen(["TH503"]) if rule.code == "TH503")
        message = "optimizer.step() is never called: there are backwards and an optimizer, but nothing is trained"
        model = next((type(module).__name__ for module in self._modules()), "model")
        return Report((rule.finding(message, cause="loop"),), model=model)

    def _dissect(self, lane: Lane, losses: list[Tensor], concerned: list[Training]) -> None:
        """Take the loss apart before its backward frees the graph; not with several trainings, which may share it."""
        if not any(training.notes.looks for training in concerned):
            return
        if sum(known.lane is lane for known in self._known().values()) == 1:
            lane.terms += [terms_arriving(loss) for loss in losses]

    def _suspect(self, lane: Lane, losses: list[Tensor], values: list[Tensor]) -> None:
        """A backward begins where no optimizer has ever stepped; the script may train by hand."""
        mine = [known for known in self._known().values() if known.lane is lane or not known.steps]
        if mine and lane.lonely < _LONELY:  # it accumulates, as far as we know
            lane.lonely += 1
            return
        hands = [hand for hand in self._by_hand if hand.lane is lane]
        if lane.suspicion is None and not hands and not lane.is_unfounded:
            leaves = leaves_of(losses)
            roots = _largest(_holding(set(map(id, leaves)), self._modules()))
            lane.suspicion = Suspicion(roots, leaves) if leaves else None
        elif lane.suspicion is not None and lane.suspicion.has_changed(lambda: leaves_of(losses)):
            hands = self._watch_by_hand(lane, lane.suspicion, losses)
        for hand in hands:
            hand.backward(losses, values)
        if lane.suspicion is not None:
            lane.suspicion.losses += values
            if lane.suspicion.is_unfounded:
                lane.suspicion, lane.is_unfounded = None, True
                self._never_steps |= lane.lonely >= _LONELY
                self._give_up(mine)

    def _give_up(self, optimizers: Iterable[KnownOptimizer]) -> None:
        """Look for the modules of these optimizers no more."""
        for known in optimizers:
            known.patience = 0
        self._rest()

    def _watch_by_hand(self, lane: Lane, suspicion: Suspicion, losses: list[Tensor]) -> list[HandTraining]:
        """Begin to watch what is trained without an optimizer, in its second step."""
        lane.suspicion = None
        self._give_up(known for known in self._known().values() if known.lane is lane)
        for training in [known for known in self._trainings if known.model() in suspicion.roots]:
            self._drop(training)
        hands = []
        roots = suspicion.roots or [Tensors(named(leaves_of(losses)))]
        for root, rest in zip(roots, suspicion.rests, strict=True):
            monitor = self._monitor(root, None, 0)
            if monitor is not None:
                monitor.wait(rest)
                hands.append(HandTraining(root, monitor, suspicion, self._guarded, lane))
        self._by_hand += hands
        return hands

    def _updated(self, *args: Any, **kwargs: Any) -> None:
        """A GradScaler was updated; losses that are left belong to a step that it skipped."""
        self._lane().forget()

    def _begun(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer begins to step; backwards from now on come from its closure, which it may call several times."""
        if is_inside_a_step():  # an optimizer may call the step of its parent class
            return
        lane = self._lane()
        with self._lock:
            known = self._optimizers.setdefault(optimizer, KnownOptimizer(lane))
            lane.begin(self._waiting(lane, optimizer, known))
        known.lane = lane
        self._end_by_hand(lane)
        if not known.steps or not self._own(optimizer):
            self._meet(optimizer, known)
        for training in self._own(optimizer):
            training.lane = lane
            training.notes.schedules = self._schedules.of(optimizer)
            training.notes.stepping()

    def _waiting(self, lane: Lane, optimizer: Optimizer, known: KnownOptimizer) -> list[Tensor]:
        """The losses that belong to the step of an optimizer: those of its thread, unless they are of another
        optimizer, and those of other threads that depend on its parameters.
        """
        held, elsewhere = (set(), set()) if len(self._lanes) == 1 else (_held(optimizer), self._held_apart(optimizer))
        losses = lane.take(lambda leaves: leaves is None or bool(leaves & held) or not leaves & elsewhere)
        for other in self._lanes:
            if other is not lane and other.losses:
                was_there = other is known.lane and not other.has_stepped
                taken = other.take(partial(_meets, held, was_there))
                other.has_helped |= bool(taken)
                losses += taken
        self._wanders |= any(some.has_helped and some.has_stepped for some in (lane, *self._lanes))
        return losses

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if is_inside_a_step():
            return
        lane, optimizers = self._lane(), self._known()
        optimizers[optimizer].steps += 1
        losses, terms, drawn = lane.end(self._loading(lane))
        for training in [training for training in self._trainings if training.lane is lane]:
            training.idle += 1
            if losses and training.optimizer() is not optimizer:
                training.notes.rival_stepped()
        for training in self._own(optimizer):
            training.step(losses, terms, drawn)
        for known in optimizers.values():
            known.patience -= 1 if known.lane is lane else _ELSEWHERE
        self._rest()

    def _loading(self, lane: Lane) -> list[Lane]:
        """The lanes that load the batches of this one, if it is the only one that trains."""
        if len(self._lanes) == 1 or any(training.lane is not lane for training in list(self._trainings)):
            return []
        return [other for other in self._lanes if not self._has_optimizer(other)]

    def _end_by_hand(self, lane: Lane, state: str = "ended", error: BaseException | None = None) -> None:
        for hand in [hand for hand in self._by_hand if hand.lane is lane]:
            self._by_hand.remove(hand)
            hand.close()
            hand.monitor.close(state, error)

    def _raised(self, raised: threading.ExceptHookArgs) -> None:
        """A thread ends with an exception: what it trains has failed, although the script goes on."""
        error, lane = raised.exc_value, getattr(self._here, "lane", None)
        if lane is None or error is None or isinstance(error, SystemExit):
            return
        self._end_by_hand(lane, "failed", error)
        for training in [one for one in list(self._trainings) if one.lane is lane and one.has_begun]:
            if self._taken(training):
                training.close("failed", error)

    def _own(self, optimizer: Optimizer) -> list[Training]:
        return [training for training in list(self._trainings) if training.optimizer() is optimizer]

    def _meet(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        """An optimizer is about to step, for the first time or without a monitor."""
        if known.lane.brief >= _FLEETINGS and known.steps < _FLEETING:
            return
        if known.roots is None:
            self._find(optimizer, known)
        roots = [root for reference in known.roots or () if (root := reference()) is not None]
        for root in roots:
            training = next((training for training in list(self._trainings) if training.model() is root), None)
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

    def _find(self, optimizer: Optimizer, known: KnownOptimizer) -> None:
        """Find out what an optimizer trains; if that is not clear yet, try again before its next step."""
        if not self._is_looking:
            known.patience = _PATIENCE
            self._look()
            return
        held = _held(optimizer)
        is_late = known.steps >= _ATTEMPTS  # hooks do not see the calls inside a compiled graph
        roots = _holding(held, self._modules()) or (_holding(held, instances(nn.Module)) if is_late else [])
        if not roots and known.steps >= _STALE and not _has_gradient(optimizer):
            roots = self._untrained(known.lane)
        if not roots and (is_late or self._is_bare(optimizer)):
            known.bare = Tensors(named(_parameters(optimizer)))
            roots = [known.bare]
        if roots:
            known.roots = [weakref.ref(root) for root in _largest(roots)]

    def _is_bare(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer trains tensors that are in no module, as far as that is known yet."""
        if not _has_gradient(optimizer):
            return False
        if not any(isinstance(parameter, nn.Parameter) for parameter in _parameters(optimizer)):
            return True
        self._searches += 1
        return self._searches <= _SEARCHES and not _holding(_held(optimizer), instances(nn.Module))

    def _untrained(self, lane: Lane) -> list[nn.Module]:
        """The models of a lane that get gradients but are in no optimizer: theirs may be one with other parameters."""
        held = {id_ for optimizer in self._known() for id_ in _held(optimizer)}
        called = [module for module, where in self._modules().items() if where is lane]
        models = [root for root in outermost(called) if any(p.grad is not None for p in root.parameters())]
        return [root for root in models if not any(id(parameter) in held for parameter in root.parameters())]

    def _watch(self, root: nn.Module, optimizer: Optimizer, is_late: bool = False) -> None:
        """Begin to watch a model; `is_late` if its forward is over, so that its next step is the first to measure."""
        weak = weakref.proxy(optimizer)  # the training is over when the script drops its optimizer
        known = self._known()[optimizer]
        known.lane = self._lane()
        monitor = self._monitor(root, weak, known.steps)
        if monitor is None:
            known.roots = []  # do not try again
            return
        if is_late:
            monitor.wait()
        training = Training(root, optimizer, monitor, self._guarded, known.lane)
        training.notes.others = lambda: self._held_apart(training.optimizer())
        for other in list(self._trainings):
            if other.lane is not training.lane:
                other.notes.disown(list(training.lane.feeders))
        self._trainings.append(training)

    def _held_apart(self, own: Optimizer | None) -> set[int]:
        """The ids of the parameters that other optimizers have."""
        return {id_ for optimizer in self._known() if optimizer is not own for id_ in _held(optimizer)}

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
        if not self._taken(training):
            return
        training.close()
        if training.steps < _FLEETING:
            self._brief.append(training.monitor)
            training.lane.brief += 1

    def _drop(self, training: Training) -> None:
        """Forget a training that never took a step."""
        if self._taken(training):
            training.close()
            self._forget_monitor(training.monitor)

    def _taken(self, training: Training) -> bool:
        """Take a training off the list; whether it was there. Another thread may have done so."""
        with self._lock:
            if training not in self._trainings:
                return False
            self._trainings.remove(training)
            return True

    def _forget_monitor(self, monitor: Monitor) -> None:
        self.watched.remove(monitor)
        if monitor.run is not None and world_size() == 1:  # other ranks may still use it
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


def _parameters(optimizer: Optimizer | None) -> list[Tensor]:
    return [] if optimizer is None else [known for group in optimizer.param_groups for known in group["params"]]


def _held(optimizer: Optimizer | None) -> set[int]:
    """The ids of the parameters that an optimizer has."""
    return set(map(id, _parameters(optimizer)))


def _meets(held: set[int], is_unknown_mine: bool, leaves: set[int] | None) -> bool:
    """Whether a loss depends on one of the parameters with the ids in `held`, if its leaves are known."""
    return is_unknown_mine if leaves is None else bool(leaves & held)


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for parameter in _parameters(optimizer))


def _holding(held: set[int], modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The outermost of `modules` that have one of the parameters with the ids in `held`."""
    return [root for root in outermost(modules) if any(id(parameter) in held for parameter in root.parameters())]


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
