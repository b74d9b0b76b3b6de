"""`diagnose`: an inspection of a model in three parts, and a report of what is wrong."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchhook.calling import Batch, Loss, call, loss_of, main_tensor, on_device
from torchhook.core.selection import require_module
from torchhook.findings import Finding, Report
from torchhook.origins import Catch
from torchhook.rules.checking import check
from torchhook.rules.history import History, Modes, Task, settled
from torchhook.rules.registry import Choice, chosen
from torchhook.rules.rest import at_rest
from torchhook.rules.rule import Need, Phase, Rule
from torchhook.stepping.steps import unwrapped
from torchhook.watching.watch import Watch

PARTS = ("rest", "pass", "train")
Progress = Callable[[str, int, int], None]
"""Told of the progress: what is done, how much of it, of how much."""

_THOROUGH = 8  # steps at the beginning and at the end in which everything is measured
_SETTLING = 30  # batches after which the averages of batch norms are of the present weights
_LOST = 3  # steps without a finite loss after which there is nothing more to see


def diagnose(
    model: nn.Module,
    data: Any,
    loss: Loss | None = None,
    optimizer: Any = None,
    steps: int = 100,
    *,
    parts: Sequence[str] = PARTS,
    rules: Iterable[Choice] | None = None,
    ignore: Sequence[Choice] = (),
    per_module: Mapping[str, Sequence[str]] | None = None,
    fail_on: str = "error",
    progress: Progress | None = None,
) -> Report:
    """Inspect `model`: at rest, in a forward and backward, and in a short training of a copy of it.

    The model, the optimizer and the state of the random number generators are as before afterwards.

    Args:
        data: Batches: a DataLoader, a list, or a single batch. A tuple is inputs and, last, the target; a dict is
            keywords for the model; a tensor is the input. They are moved to the device of the model, and repeated if
            there are fewer than `steps`.
        loss: From output and target (for a dict or tensor: the batch) to a number. Without one it is the ``loss`` that
            the output has, cross entropy if the targets are classes, the mean square if they look like the outputs.
        optimizer: The one that trains the model; a copy of it trains the copy. Without one, AdamW does, and rules about
            the optimizer are skipped.
        steps: How many to train for.
        parts: Which of ``"rest"`` (weights, buffers, batch norms, optimizer), ``"pass"`` (a forward and backward of
            some batches) and ``"train"`` to do.
        rules, ignore, per_module, fail_on: As for `check`.

    >>> from torchhook import diagnose
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    >>> data = [(x, (x.sum(1) > 0).long()) for x in torch.randn(10, 64, 8)]
    >>> optimizer = torch.optim.AdamW(model[:2].parameters(), lr=3e-3)
    >>> report = diagnose(model, data, F.cross_entropy, optimizer)
    >>> print(report.findings[0])
    TH503 error: 2: the optimizer does not have it: weight, bias
    """
    require_module(model)
    if isinstance(parts, str) or any(part not in PARTS for part in parts):
        raise ValueError(f"parts must be some of {PARTS}, not {parts!r}")
    applied = [rule for rule in chosen(rules, ignore) if "rest" in parts or rule.phase != Phase.REST]
    inspection = Inspection(model, data, loss, optimizer, applied, progress or _silent)
    with _as_before(model):
        inspection.run(steps if "train" in parts else 0, "pass" in parts)
    report = check(inspection.history, applied, per_module=per_module, fail_on=fail_on, model=type(model).__name__)
    return replace(report, notes=tuple(inspection.notes))


class Inspection:
    """One inspection: what it is of, and the history that it writes."""

    def __init__(
        self, model: nn.Module, data: Any, loss: Loss | None, optimizer: Any, rules: list[Rule], progress: Progress
    ) -> None:
        self.model = model
        self.data = [data] if isinstance(data, (Tensor, tuple, Mapping)) else data
        self.loss = loss
        self.optimizer = None if optimizer is None else unwrapped(optimizer)
        self.rules = rules
        self.progress = progress
        self.history = History(rest=at_rest(model, self.optimizer), own_optimizer=optimizer is not None)
        self.notes: list[str] = []

    def run(self, steps: int, look: bool) -> None:
        """Train a copy for some steps; without any, `look` at a forward and backward of some batches."""
        if not steps and not look:
            return
        if iter(self.data) is self.data:
            self.data = list(islice(self.data, steps or _THOROUGH))
        twin, optimizer = self._twins()
        real = self._has_loss(twin)
        if steps and real and optimizer is None:
            optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-3)
            self.notes.append("no optimizer was given: the copy was trained with AdamW at a rate of 1e-3")
        trained = optimizer if steps and real else None
        self._watch(twin, trained, steps if trained is not None else _THOROUGH, real)
        if real and twin.training and any("modes" in rule.facts for rule in self.rules):
            self.history.modes = self._modes(twin)
        self.history.after = at_rest(twin, optimizer) if trained is not None else None

    def _twins(self) -> tuple[nn.Module, Any]:
        """A copy of the model, and one of the optimizer that trains that copy."""
        try:
            twin, optimizer = copy.deepcopy((self.model, self.optimizer))
        except Exception as error:
            raise ValueError(
                f"the model cannot be copied ({type(error).__name__}: {error}), and is not to be changed;"
                " parts=('rest',) does without a copy"
            ) from error
        return twin, optimizer

    def _has_loss(self, twin: nn.Module) -> bool:
        """Whether there is a loss worth making smaller; asked of the first batch if nobody gave one."""
        if self.loss is not None:
            return True
        buffers = {name: buffer.clone() for name, buffer in twin.named_buffers()}
        batch = Batch.of(on_device(next(iter(self._batches()), ()), twin))
        guess = loss_of(call(twin, batch), batch.target, None)
        for name, buffer in twin.named_buffers():
            buffer.copy_(buffers[name])
        self.notes += [f"the loss is {guess.how}"] if guess.how else []
        return guess.real

    def _watch(self, twin: nn.Module, optimizer: Any, count: int, real: bool) -> None:
        """Run the copy and write down what is seen."""
        what = "looking" if optimizer is None else "training a copy"
        lost = 0
        with Watch(twin, self.rules, optimizer, self.history) as watch, Catch(twin, None, "record") as caught:
            for step, data in enumerate(islice(self._batches(), count)):
                watch.be_thorough(step < _THOROUGH or step >= count - _THOROUGH)
                value = self._step(twin, optimizer, data, step)
                watch.step(value if real else None)
                self.progress(what, step + 1, count)
                if caught.finding is not None and self.history.origin is None:
                    self.history.origin = replace(caught.finding, step=step)
                lost = 0 if math.isfinite(value) else lost + 1
                if lost == _LOST:
                    break
        if not self.history.windows:
            raise ValueError("data has no batches")

    def _step(self, twin: nn.Module, optimizer: Any, data: Any, step: int) -> float:
        """One step of the training; the loss."""
        batch = Batch.of(on_device(data, twin))
        twin.zero_grad(set_to_none=True)
        output = call(twin, batch)
        loss = loss_of(output, batch.target, self.loss).loss
        value = float(loss.detach())
        if step == 0:
            self.history.task = task_of(output, batch.target, value)
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        return value

    def _batches(self) -> Iterator[Any]:
        """The data, again and again."""
        while True:
            empty = True
            for batch in self.data:
                empty = False
                yield batch
            if empty:
                return

    @torch.no_grad()
    def _modes(self, twin: nn.Module) -> Modes | None:
        """The same batches in eval and in train mode, after batch norms have caught up with the weights."""
        batches = list(islice(self._batches(), 4))
        for data in islice(self._batches(), _SETTLING):
            call(twin, Batch.of(on_device(data, twin)))
        means, seen = [], []
        modes = {module: module.training for module in twin.modules()}
        for training in (False, True):
            for module, mode in modes.items():
                module.training = mode and training
            with Watch(twin, [_BOTH_MODES]) as watch:
                values = []
                for data in batches:
                    batch = Batch.of(on_device(data, twin))
                    values.append(float(loss_of(call(twin, batch), batch.target, self.loss).loss))
                watch.step()
            means.append(sum(values) / len(values))
            seen.append(settled(watch.history.windows[0].snapshot))
        return Modes(train=seen[1], eval=seen[0], train_loss=means[1], eval_loss=means[0])


def task_of(output: Any, target: Any, loss: float) -> Task:
    """What kind of task it is, by what the loss is computed from."""
    try:
        prediction = main_tensor(output).detach()
    except ValueError:
        return Task(loss, (), None)
    shape = tuple(prediction.shape)
    if not isinstance(target, Tensor):
        return Task(loss, shape, None)
    classes = _classes(prediction, target, loss)
    broadcast = (
        classes is None
        and target.is_floating_point()
        and target.numel() > 1
        and prediction.squeeze().shape == target.squeeze().shape
        and torch.broadcast_shapes(prediction.shape, target.shape).numel() > max(prediction.numel(), target.numel())
    )
    total = prediction.float().sum(1 if prediction.dim() > 1 else 0)
    probabilities = bool((prediction >= 0).all()) and bool((total - 1).abs().max() < 1e-3)
    return Task(loss, shape, tuple(target.shape), classes, probabilities, broadcast)


def _classes(prediction: Tensor, target: Tensor, loss: float) -> int | None:
    """How many classes there are, if the loss is the cross entropy of the outputs."""
    try:
        entropy = float(F.cross_entropy(prediction.float(), target))
    except (RuntimeError, ValueError, IndexError):  # they are not outputs and classes
        return None
    return prediction.shape[1] if math.isclose(entropy, loss, rel_tol=1e-3, abs_tol=1e-6) else None


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put every random number generator back to where it was."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    devices = {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])


def _silent(what: str, done: int, total: int) -> None:
    """Tell nobody."""


class _Both(Rule):
    """Not for findings: what is measured in both modes."""

    code, name = "TH704", "both-modes"
    needs = (Need("output", "channels", ("dropout", "batchnorm")), Need("input", "channels", ("batchnorm",)))

    def find(self, history: History) -> Iterator[Finding]:
        return iter(())


_BOTH_MODES = _Both()
