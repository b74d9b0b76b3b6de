"""An inspection runs and trains a copy of a model, and writes what it measures into a history."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import set_detect_anomaly

from torchhook.core.batch import Batch, InputBatches, Loss, call, loss_of, on_device
from torchhook.core.event import Event
from torchhook.core.model_state import buffers_kept, evaluating
from torchhook.core.progress import Tell
from torchhook.core.selection import Query
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.torch_internals import BATCH_NORMS, submodules
from torchhook.core.trees import leaves
from torchhook.rules.active_dropout import ActiveDropout
from torchhook.rules.effects import effects_of, unreached
from torchhook.rules.history import History, Modes, Raised, settled
from torchhook.rules.kinds import kind_of
from torchhook.rules.loss_graph import leaves_of, loss_terms
from torchhook.rules.model_copy import copies_of
from torchhook.rules.origin.catch import Catch
from torchhook.rules.rest import at_rest
from torchhook.rules.rule import Need, Rule
from torchhook.rules.step import train_step
from torchhook.rules.task import task_of
from torchhook.rules.trials import Trials
from torchhook.rules.watch import Watch
from torchhook.stats.optimizer.steps import unwrapped

_THOROUGH = 8  # steps at the beginning and at the end in which everything is measured
_SETTLING = 30  # batches after which the running statistics of batch norms match the current weights
_COMPARED = 12  # batches to run in both modes
_FORWARDS, _LEAST_FORWARDS = 10, 100  # most per step, on average, of an optimizer that calls a closure several times
_LOST = 3  # consecutive steps without a finite loss after which the training is stopped
_MODES = (Need("output", "channels", ("dropout", "batchnorm")), Need("input", "channels", ("batchnorm",)))


class Inspection:
    """The model to inspect with its data and loss, and the history to write."""

    def __init__(
        self,
        model: nn.Module,
        data: InputBatches,
        loss: Loss | None,
        optimizer: Any,
        rules: list[Rule],
        tell: Tell | None,
    ) -> None:
        self.model = model
        self.data: InputBatches | list[Any] = data
        self.loss = loss
        self.optimizer = None if optimizer is None else unwrapped(optimizer)
        self.rules = rules
        self.tell = tell
        self.history = History(rest=at_rest(model, self.optimizer), own_optimizer=optimizer is not None)
        self.notes: list[str] = []

    def run(self, steps: int, look: bool) -> None:
        """Train a copy for some steps; without steps, only `look` at a forward and backward of some batches."""
        if not steps and not look:
            return
        if isinstance(self.data, InputBatches) and not self.data.repeats:
            self.data = list(islice(self.data, steps or _THOROUGH))
        if next(self._batches(), None) is None:
            raise ValueError("data has no batches")
        twin, optimizer = copies_of(self.model, self.optimizer)
        real = self._has_loss(twin)
        trained = self._trained(twin, optimizer) if steps and real else None
        self._watch(twin, trained, steps if trained is not None else _THOROUGH, real)
        if self.history.raised is None:
            self.history.effects = effects_of(unreached(self.history), twin, next(self._batches()), self.loss)
        if real and _has_modes(twin) and any("modes" in rule.facts for rule in self.rules):
            self._compare_modes(twin)
        if trained is not None:
            self.history.after = at_rest(twin, trained)

    def trials(self, steps: int, seconds: float) -> Trials | None:
        """Trials of repairs on the batches of one epoch; None if nothing was trained."""
        if self.history.after is None:
            return None
        batches = [Batch.of(on_device(data, self.model)) for data in islice(iter(self.data), steps)]
        return Trials(self._copies, batches, self.loss, steps, seconds, self.history.chance)

    def _copies(self) -> tuple[nn.Module, Any]:
        """A copy of the model, and the optimizer that trains it; None if there is nothing to train."""
        twin, optimizer = copies_of(self.model, self.optimizer)
        return twin, self._trained(twin, optimizer)

    def _has_loss(self, twin: nn.Module) -> bool:
        """Whether there is a loss worth minimising; if none was given, the first batch decides."""
        if self.loss is not None:
            return True
        batch = Batch.of(on_device(next(self._batches()), twin))
        with buffers_kept(twin):
            guess = loss_of(call(twin, batch), batch.target, None)
        self.notes += [f"the loss is {guess.how}"] if guess.how else []
        return guess.real

    def _trained(self, twin: nn.Module, optimizer: Any) -> Any:
        """The optimizer that trains the copy; None if there is nothing to train."""
        parameters = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        if not parameters:
            self._note("no parameter requires a gradient: nothing was trained")
            return None
        if optimizer is None:
            return self._own_optimizer(twin, parameters)
        for group in optimizer.param_groups:
            if group.get("lr") == 0 and group.get("initial_lr"):
                group["lr"] = group["initial_lr"]
                self._note(f"the schedule is at a learning rate of 0: the copy was trained at {group['lr']:.2g}")
        return optimizer

    def _own_optimizer(self, twin: nn.Module, parameters: list[nn.Parameter]) -> Any:
        """An optimizer for the copy if the user gave none; None if no default is safe."""
        if any(parameter.dtype == torch.float16 for parameter in parameters):
            self._note("no optimizer was given, and no default is safe for float16 weights: nothing was trained")
            return None
        if any(getattr(module, "sparse", False) for module in twin.modules()):
            self._note("no optimizer was given: the copy was trained with SGD at a learning rate of 0.01")
            return torch.optim.SGD(parameters, lr=0.01)  # supports sparse gradients
        self._note("no optimizer was given: the copy was trained with AdamW at a learning rate of 1e-3")
        return torch.optim.AdamW(parameters, lr=1e-3)

    def _note(self, note: str) -> None:
        """Add a note, once."""
        if note not in self.notes:
            self.notes.append(note)

    def _watch(self, twin: nn.Module, optimizer: Any, count: int, real: bool) -> None:
        """Run or train the copy for `count` steps, and add each to the history."""
        what = "running a copy" if optimizer is None else "training a copy"
        lost = forwards = 0
        most, batches = max(_FORWARDS * count, _LEAST_FORWARDS), self._batches()
        with Watch(twin, self.rules, optimizer, self.history) as watch, Catch(twin, None, "record") as caught:
            for step in range(count):
                watch.be_thorough(step < _THOROUGH or step >= count - _THOROUGH)
                try:
                    value, more = self._step(twin, optimizer, next(batches), step, watch.is_thorough)
                except Exception as error:
                    if not step and not isinstance(error, IndexError):  # a label out of range raises that
                        raise
                    self.history.raised = Raised.of(error, step)
                    break
                watch.step(value if real else None)
                if self.tell is not None:
                    self.tell(what, step + 1, count)
                if caught.finding is not None and self.history.origin is None:
                    self.history.origin = replace(caught.finding, step=step)
                lost, forwards = 0 if math.isfinite(value) else lost + 1, forwards + more
                if lost == _LOST or forwards >= most:
                    break

    def _step(self, twin: nn.Module, optimizer: Any, data: Any, step: int, look: bool) -> tuple[float, int]:
        """Run one step of the training, and return its loss and the number of forwards; `look` at what it compares."""
        batch = Batch.of(on_device(data, twin))
        makers: dict[Any, str] = {}

        def on_loss(output: Any, loss: Tensor) -> None:
            if step == 0 and self.history.task is None:
                self.history.task = task_of(output, batch.target, float(loss.detach()), self.loss)
            if step == 0 and optimizer is not None:
                self.history.unlisted = len(_unlisted(output, optimizer, twin, self.model))
            self.history.terms[step] = loss_terms(loss, makers, batch.target)

        if not look:
            return train_step(twin, optimizer, batch, self.loss)
        with makers_noted(twin, makers), set_detect_anomaly(step == 0, check_nan=False):
            return train_step(twin, optimizer, batch, self.loss, on_loss)

    def _batches(self) -> Iterator[Any]:
        """The batches, repeated forever."""
        while True:
            empty = True
            for batch in self.data:
                empty = False
                yield batch
            if empty:
                return

    def _compare_modes(self, twin: nn.Module) -> None:
        """Run the same batches in eval and in train mode, once batch norms have caught up with the weights."""
        settling = _SETTLING if any(isinstance(module, BATCH_NORMS) for module in twin.modules()) else 0
        try:
            with torch.no_grad():
                for data in islice(self._batches(), settling):
                    call(twin, Batch.of(on_device(data, twin)))
                with evaluating(twin), ActiveDropout(twin) as dropping:
                    evaluated = self._run(twin)
                trained = self._run(twin)
        except Exception as error:  # of the user's code: the loss may not fit the output in eval mode
            self.notes.append(f"train and eval mode were not compared: {type(error).__name__}: {error}")
            return
        batches = tuple(settled(window.snapshot) for window in trained.windows)
        losses = {name: fmean(seen.losses.values()) for name, seen in (("train", trained), ("eval", evaluated))}
        self.history.modes = Modes(
            trained.whole(), batches, evaluated.whole(), losses["train"], losses["eval"], dropping.found
        )

    def _run(self, twin: nn.Module) -> History:
        """The statistics of batch norms and dropouts on some batches, and the losses."""
        with Watch(twin, [], needs=_MODES) as watch:
            for data in islice(self._batches(), _COMPARED):
                batch = Batch.of(on_device(data, twin))
                watch.step(loss_of(call(twin, batch), batch.target, self.loss).loss)
        return watch.history


def _unlisted(output: Any, optimizer: Any, *models: nn.Module) -> list[nn.Parameter]:
    """The parameters that the output depends on, but that neither a model nor the optimizer has."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    known |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    used = leaves_of(leaf for _, leaf in leaves(output))
    return [leaf for leaf in used if isinstance(leaf, nn.Parameter) and id(leaf) not in known]


def _has_modes(twin: nn.Module) -> bool:
    """Whether anything inside may behave differently in eval mode, as a class that is not torch's own may."""
    return twin.training and not all(_ignores_mode(module) for module in twin.modules())


def _ignores_mode(module: nn.Module) -> bool:
    modal = ("batchnorm", "dropout", "attention", "recurrent")
    return type(module).__module__.startswith("torch.nn.modules") and kind_of(type(module).__name__) not in modal


def makers_noted(model: nn.Module, makers: dict[Any, str]) -> Session:
    """Note in `makers` which module made each node of the autograd graph; the innermost counts."""

    def note(event: Event) -> None:
        for _, leaf in leaves(event.live):
            if leaf.grad_fn is not None:
                makers.setdefault(leaf.grad_fn, event.path)

    inside: tuple[Query, ...] = (lambda path, module: True,) if submodules(model) else ()
    return Session(model, [Tap(("", *inside), note)], on_silent="ignore")
