"""Finds out what a script trains, without its help.

Until an optimizer has stepped, every module that is called with gradients enabled is noted. Then the outermost of them
that hold parameters of this optimizer are what it trains. The tensor on which `backward` is called between two steps is
the loss. Hooks on all modules are there for that step only. Later there is one hook on the steps of optimizers; when an
unknown optimizer steps, modules are noted again until its next step.
"""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchhook.core.compiled import tracing
from torchhook.core.errors import StopTraining
from torchhook.core.hooks.registration import on_any_call, on_any_step
from torchhook.core.text import warn
from torchhook.rules.registry import Choice
from torchhook.stats.optimizer.steps import is_inside_a_step
from torchhook.training.monitor import Monitor, OnFinding, state_of
from torchhook.training.process import rank

_ATTEMPTS = 20  # steps of an optimizer until we stop waiting for its modules to be called
_PATIENCE = 100  # steps of other optimizers during which we look for the modules of an unknown one
_REPLACED = 20  # steps that an optimizer takes alone until it counts as the successor of another
_IDLE = 1000  # steps of other optimizers after which a training is over
_WATCHED = 8  # models of one optimizer that are watched, at most
_BACKWARDS = 1000  # losses that are kept between two steps, at most


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
        self._trainings: list[Training] = []
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # steps of each so far
        self._roots: weakref.WeakKeyDictionary[Optimizer, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()
        self._losses: deque[Tensor] = deque(maxlen=_BACKWARDS)
        self._before: list[Tensor] = []  # losses from before the step began
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
        self._always.enter_context(_unwarned("Using `torch.compile.* when there are global hooks on modules"))
        for handle in on_any_step(self._guarded(self._begun), self._guarded(self._stepped)):
            self._always.callback(handle.remove)
        self._always.enter_context(_patched(torch.autograd, "backward", before=self._guarded(self._backward)))
        self._always.enter_context(_patched(torch.amp.GradScaler, "update", after=self._guarded(self._updated)))
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._look_no_more()
        self._always.close()
        for monitor in self.watched:
            monitor.close(state_of(error))

    def _look(self) -> None:
        """Note the modules that are called, from now on."""
        self._called.clear()
        self._patience = _PATIENCE
        self._looking.callback(on_any_call(self._guarded(self._note)).remove)

    def _look_no_more(self) -> None:
        self._patience = 0
        self._looking.close()

    def _note(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self._called[module] = None

    def _backward(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        """A backward begins; the tensors that it starts from are the loss, or parts of it."""
        self._forget()
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tensors:
            if isinstance(tensor, Tensor) and tensor.numel() == 1:
                self._losses.append(tensor.detach().reshape(()).clone())

    def _updated(self, *args: Any, **kwargs: Any) -> None:
        """A GradScaler was updated; losses that are left belong to a step that it skipped."""
        self._losses.clear()

    def _begun(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer begins to step; backwards from now on come from its closure, which it may call several times."""
        if not is_inside_a_step():
            self._before = list(self._losses)
            self._losses.clear()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An optimizer has stepped."""
        if is_inside_a_step():  # an optimizer may call the step of its parent class
            return
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        losses = [*self._before, *list(self._losses)[-1:]]
        self._losses.clear()
        own = [training for training in self._trainings if training.optimizer() is optimizer]
        for training in self._trainings:
            training.idle += 1
        for training in own:
            training.step(losses)
        if not own:
            self._meet(optimizer)
        self._patience -= 1
        if self._patience <= 0 or all(known in self._roots for known in self._steps):
            self._look_no_more()

    def _meet(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped that no monitor watches."""
        if optimizer not in self._roots:
            self._find(optimizer)
        for root in [found for known in self._roots.get(optimizer, ()) if (found := known()) is not None]:
            training = next((training for training in self._trainings if training.model() is root), None)
            if training is None:
                self._watch(root, optimizer)
            elif training.is_replaced():  # until then they may alternate, and watching one of them is enough
                self._end(training)
                self._watch(root, optimizer)

    def _find(self, optimizer: Optimizer) -> None:
        """Find out what an optimizer trains; if that is not clear yet, try again after its next step."""
        if not self._patience:
            self._look()
            return
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        is_late = self._steps[optimizer] >= _ATTEMPTS
        roots = _holding(held, self._called) or (_holding(held, _all_modules()) if is_late else [])
        if roots or is_late:
            self._roots[optimizer] = [weakref.ref(root) for root in _largest(roots)]

    def _watch(self, root: nn.Module, optimizer: Optimizer) -> None:
        name = f"{self._name}-{type(root).__name__}" if self.watched else self._name
        weak = weakref.proxy(optimizer)  # the training is over when the script drops its optimizer
        try:
            monitor = Monitor(root, weak, name=name, first_step=self._steps[optimizer], **self._options)
        except Exception as error:
            self._roots[optimizer] = []  # do not try again
            _warn(f"could not watch {type(root).__name__}: {type(error).__name__}: {error}")
            return
        self.watched.append(monitor)
        self._trainings.append(Training(root, optimizer, monitor))

    def _forget(self) -> None:
        """End the trainings that are over. (Not from a finalizer of the optimizer, which may run at any point.)"""
        for training in list(self._trainings):
            if training.optimizer() is None or training.idle > _IDLE:
                self._end(training)

    def _end(self, training: Training) -> None:
        training.monitor.close()
        self._trainings.remove(training)

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


class Training:
    """A model, the optimizer that trains it, and the monitor that watches both."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, monitor: Monitor) -> None:
        self.model = weakref.ref(model)
        self.optimizer = weakref.ref(optimizer)
        self.monitor = monitor
        self.idle = 0  # steps of other optimizers since our last one
        self.others = 0  # those of them that trained the same model

    def step(self, losses: list[Tensor]) -> None:
        """The optimizer has stepped, after a backward of each of `losses`."""
        self.idle = self.others = 0
        total = torch.stack([loss.to(losses[0].device, torch.float64) for loss in losses]).sum() if losses else None
        self.monitor.step(None if total is None else self.monitor.unscaled(total))

    def is_replaced(self) -> bool:
        """Whether another optimizer, which just stepped, has replaced ours."""
        self.others += 1
        return self.others > _REPLACED


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


@contextmanager
def _unwarned(pattern: str) -> Iterator[None]:
    """Suppress the warnings that match `pattern`, which our own hooks would cause."""
    warnings.filterwarnings("ignore", pattern, UserWarning)
    ours = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError, AttributeError):  # the script may have changed the filters
            warnings.filters.remove(ours)  # type: ignore[attr-defined]  # a list, in fact


@contextmanager
def _patched(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call functions before or after one of torch's that offers no hook."""
    original = getattr(owner, name)

    @wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, around)
    try:
        yield
    finally:
        setattr(owner, name, original)
