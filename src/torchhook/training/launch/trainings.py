"""A training that was found: its model, its optimizer, the monitor that watches both, and notes of its loop."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchhook.core.call_wrapper import compiled_among
from torchhook.core.hooks.registration import Removable, before_call
from torchhook.rules.loss_graph import merged
from torchhook.training.launch.feeding import Feeder
from torchhook.training.launch.lanes import Lane
from torchhook.training.launch.loop import LoopNotes
from torchhook.training.launch.patches import Guard
from torchhook.training.monitor import Monitor, Terms

_REPLACED = 20  # steps that an optimizer takes alone until it counts as the successor of another


class Training:
    """A model, the optimizer that trains it, and the monitor that watches both."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, monitor: Monitor, guard: Guard, lane: Lane) -> None:
        self.model = weakref.ref(model)
        self.optimizer = weakref.ref(optimizer)
        self.monitor = monitor
        self.lane = lane  # the thread in which the optimizer stepped last
        self.notes = LoopNotes(model, optimizer, [p for group in optimizer.param_groups for p in group["params"]])
        monitor.notes = self.notes
        self.steps = 0  # that the optimizer has taken
        self.idle = 0  # steps of other optimizers since our last one
        self.others = 0  # those of them that trained the same model
        self._handle: Removable | None = None
        if not compiled_among([model]):  # which would have to be compiled again
            self._handle = before_call(model, guard(self.notes.called))

    def step(self, losses: Sequence[Tensor], terms: Sequence[Terms], drawn: dict[Feeder, int]) -> None:
        """The optimizer has stepped, after a backward of each of `losses`, with the batches that were `drawn`."""
        self.steps += 1
        self.idle = self.others = 0
        whole = total(losses)
        self.notes.stepped(drawn)
        if terms:
            self.monitor.compare(lambda: merged(read() for read in terms))
        self.monitor.step(None if whole is None else self.monitor.unscaled(whole))
        self.notes.plan(self.monitor.is_measuring)

    @property
    def has_begun(self) -> bool:
        """Whether the optimizer has stepped."""
        return self.steps > 0

    def is_replaced(self) -> bool:
        """Whether another optimizer, which just stepped, has replaced ours."""
        self.others += 1
        return self.others > _REPLACED

    def close(self, state: str = "ended", error: BaseException | None = None) -> None:
        """The training is over; `error` is what it failed with."""
        if self._handle is not None:
            self._handle.remove()
        self.monitor.close(state, error)


def total(losses: Sequence[Tensor]) -> Tensor | None:
    """The sum of losses that may be on several devices; None if there are none."""
    if not losses:
        return None
    return torch.stack([loss.to(losses[0].device, torch.float64) for loss in losses]).sum()
