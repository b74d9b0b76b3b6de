"""Takes notes of the loop around one training, for the rules on loops. Nothing here waits for the device."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchhook.core.selection import plain, unwrapped, walk
from torchhook.core.torch_internals import BATCH_NORMS, DROPOUTS, saved_by
from torchhook.core.transfer import sent_home
from torchhook.rules.loop import Loop
from torchhook.stats.stat import counted
from torchhook.training.launch.feeding import Feeder
from torchhook.training.launch.schedules import Schedule

FIRST = 20  # steps that are looked at in any case
_MOST = 200  # steps that are looked at, all in all
_SAMPLED = 3  # parameters whose gradients are looked at
_VALUES = 10_000  # of each of them
_IN_A_ROW = 3  # forwards without gradients that are an evaluation


class LoopNotes:
    """What the script does between two steps of one training."""

    def __init__(self, root: nn.Module, optimizer: Optimizer | None, parameters: Iterable[Tensor]) -> None:
        self.schedules: list[Schedule] = []
        self.others: Callable[[], set[int]] = set  # the ids of the parameters of other optimizers
        self.steps = 0
        self.looks = True  # whether this step is looked at
        self._root = weakref.ref(root)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._sample = [weakref.ref(parameter) for parameter in _spread(list(parameters))]
        self._switches = {path: module for path, module in walk(root) if _is_switch(module)}
        self._found: Counter[str] = Counter()
        self._backwards: Counter[int] = Counter()
        self._forwards: Counter[int] = Counter()
        self._fed: Counter[int] = Counter()
        self._dirty: list[Tensor | None] = []  # whether gradients were left when each backward of this step began
        self._unzeroed: list[Callable[[], Tensor]] = []  # for each step that may have been without zeros
        self._calls = self._count = 0  # forwards and backwards in this step
        self._row = 0  # forwards without gradients in a row
        self._is_stepping = False
        self._in_eval: bool | None = None  # the mode of the last forward with gradients
        self._feeders: dict[Feeder, None] = {}
        self._hasty = self._is_idle = False
        self._elsewhere: frozenset[str] = frozenset()
        self.has_ended = False

    def called(self, module: nn.Module, args: Any) -> None:
        """The model is called."""
        if module is not self._root():  # a copy of it, with our hook
            return
        training = unwrapped(module).training
        self._found["evaluated_in_eval"] += not training
        if torch.is_grad_enabled():
            self._calls += 1
            self._in_eval = not training and not any(switch.training for switch in self._switches.values())
            self._row = 0
        elif self.steps and training:
            self._row += 1
            if self._row >= _IN_A_ROW:
                self._found["evaluated_in_train"] += _IN_A_ROW if self._row == _IN_A_ROW else 1

    def backward(self, losses: Sequence[Tensor]) -> None:
        """A backward begins."""
        self._row = 0
        if self._in_eval is not None:
            self._found["trained"] += 1
            self._found["trained_in_eval"] += self._in_eval
        if self.looks:
            self._count += not self._is_stepping  # a closure may be called many times
            self._dirty.append(self._left())
            self._found["total"] += len(losses)
            self._found["undivided"] += sum(_is_plain_mean(loss) for loss in losses)

    def stepping(self) -> None:
        """The optimizer begins to step."""
        self._is_stepping = True
        self._is_idle = self.looks and self._has_no_gradient()
        if not self.steps:
            self._hasty = any(schedule.steps == 1 for schedule in self.schedules)

    def rival_stepped(self) -> None:
        """Another optimizer has stepped on a loss of its own."""
        self._found["rivals"] += 1

    def stepped(self, drawn: dict[Feeder, int]) -> None:
        """A step is over."""
        self._feeders.update(dict.fromkeys(drawn))
        if self.looks and self._dirty:
            self._found["looked"] += 1
            self._found["idle"] += self._is_idle and self._has_no_gradient()  # a closure may have made some
            self._backwards[max(self._count, 1)] += 1
            self._forwards[self._calls] += 1
            if drawn:
                self._fed[sum(drawn.values())] += 1
            left = [dirty for dirty in self._dirty if dirty is not None]
            if self.steps and len(left) == len(self._dirty):
                self._unzeroed.append(sent_home(torch.stack(left).all(0).any()))
        self.steps += 1
        self._is_stepping = False
        self._dirty, self._calls, self._count, self._row = [], 0, 0, 0

    def disown(self, feeders: Iterable[Feeder]) -> None:
        """These loaders turned out to feed another training."""
        for feeder in feeders:
            self._feeders.pop(feeder, None)

    def plan(self, measures: bool) -> None:
        """Decide whether to look at the next step, which may be measured."""
        self.looks = self.steps < FIRST or (measures and self._found["looked"] < _MOST)

    def facts(self) -> Callable[[], Loop]:
        """A reader of what is known by now; only reading waits for the device."""
        root = self._root()
        if root is not None and (self.steps <= FIRST or self.has_ended):
            self._elsewhere |= _paths(root, self.others())  # an optimizer may be gone by now
        unzeroed = list(self._unzeroed)
        known = Loop(
            elsewhere=self._elsewhere,
            backwards=dict(self._backwards),
            forwards=dict(self._forwards),
            fed=dict(self._fed),
            schedules=tuple(schedule.name for schedule in self.schedules),
            scheduled=any(schedule.steps for schedule in self.schedules),
            hasty=self._hasty,
            switches=tuple(self._switches),
            feedings=tuple(feeder.facts() for feeder in list(self._feeders)),
            steps=self.steps,
            has_ended=self.has_ended,
            **self._found,
        )
        return lambda: replace(known, unzeroed=sum(bool(arrived()) for arrived in unzeroed))

    def _has_no_gradient(self) -> bool:
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        return bool(groups) and all(parameter.grad is None for group in groups for parameter in group["params"])

    def _left(self) -> Tensor | None:
        """Whether some gradients, one by one, are not zero; None if none of them exists."""
        known = [parameter for reference in self._sample if (parameter := reference()) is not None]
        gradients = [parameter.grad for parameter in known if parameter.grad is not None]
        if not gradients:
            return None
        flags = [counted(gradient).reshape(-1)[:_VALUES].any() for gradient in gradients]
        flags += [torch.zeros_like(flags[0])] * (len(self._sample) - len(flags))
        return torch.stack([flag.to(flags[0].device) for flag in flags])


def _spread(parameters: list[Tensor]) -> list[Tensor]:
    """The first, the middle and the last of the parameters that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    places = {round(part * (len(trained) - 1) / (_SAMPLED - 1)) for part in range(_SAMPLED)} if trained else set()
    return [trained[place] for place in sorted(places)]


def _is_switch(module: nn.Module) -> bool:
    """Whether a module does something else in train mode than in eval mode."""
    if isinstance(module, DROPOUTS):
        return bool(module.p > 0)
    return isinstance(module, BATCH_NORMS)


def _is_plain_mean(loss: Tensor) -> bool:
    """Whether a loss is a mean that nothing divides or weighs."""
    node = loss.grad_fn
    return node is not None and (node.name().startswith("Mean") or saved_by(node, "reduction") == 1)


def _paths(root: nn.Module, ids: set[int]) -> frozenset[str]:
    if not ids:
        return frozenset()
    return frozenset(plain(path) for path, known in unwrapped(root).named_parameters() if id(known) in ids)
