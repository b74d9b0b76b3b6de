"""Trainings without an optimizer: the script itself changes its parameters between two backwards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchhook.core.hooks.registration import before_call
from torchhook.rules.rest import Rest, at_rest
from torchhook.stats.stat import counted
from torchhook.training.launch.loop import LoopNotes
from torchhook.training.launch.patches import Guard
from torchhook.training.launch.tensors import Tensors, named
from torchhook.training.launch.trainings import total
from torchhook.training.monitor import Monitor

_PATIENCE = 20  # backwards until we stop waiting for a change
_LOOKED_AT = 8  # tensors of which we compare values
_VALUES = 64  # of each of them


class Suspicion:
    """Some backwards without an optimizer, which are a training once most of their leaves change.

    Leaves that are replaced by others of the same shapes have changed, too. `roots` are the modules that hold leaves;
    without any, tensors are trained.
    """

    def __init__(self, roots: Sequence[nn.Module], leaves: Sequence[Tensor]) -> None:
        self.roots = list(roots)
        self.rests: list[Rest] = [at_rest(root) for root in roots or [Tensors(named(leaves))]]
        self.losses: list[Tensor] = []
        self._shapes = sorted(leaf.shape for leaf in leaves)
        self._leaves = [weakref.ref(leaf) for leaf in leaves[:_LOOKED_AT]]
        self._before = [_some(leaf) for leaf in leaves[:_LOOKED_AT]]

    @property
    def is_unfounded(self) -> bool:
        """Whether there were many backwards, and nothing changed."""
        return len(self.losses) > _PATIENCE

    def has_changed(self, leaves: Callable[[], Sequence[Tensor]]) -> bool:
        """Whether the script has trained; `leaves` are those of the backward that begins."""
        both = zip(self._leaves, self._before, strict=True)
        known = [(leaf, old) for reference, old in both if (leaf := reference()) is not None]
        if not known:
            return sorted(leaf.shape for leaf in leaves()) == self._shapes
        return 2 * sum(not torch.equal(_some(leaf), old) for leaf, old in known) > len(self._leaves)


class HandTraining:
    """A model, or tensors, that a script trains without an optimizer; a step is as many backwards as the first one."""

    def __init__(self, root: nn.Module, monitor: Monitor, suspicion: Suspicion, guard: Guard, lane: object) -> None:
        self.monitor = monitor
        self.lane = lane  # the thread that trains it
        self.notes = LoopNotes(root, None, root.parameters())
        monitor.notes = self.notes
        self._backwards = max(len(suspicion.losses), 1)
        self._losses = list(suspicion.losses)
        self._handle = before_call(root, guard(self._called))
        self.step()
        if suspicion.roots:  # the forward of the second step is over
            monitor.wait()

    def backward(self, losses: list[Tensor], values: list[Tensor]) -> None:
        """A backward of `losses` begins, which have these values."""
        if len(self._losses) >= self._backwards:
            self.step()
        self.notes.backward(losses)
        self._losses += values

    def step(self) -> None:
        """A step has ended."""
        losses, self._losses = self._losses, []
        self.notes.stepped({})
        self.monitor.step(total(losses))
        self.notes.plan(self.monitor.is_measuring)

    def close(self) -> None:
        """The script has ended."""
        if self._losses:
            self.step()
        self._handle.remove()

    def _called(self, module: nn.Module, args: object) -> None:
        """The model is called: if all backwards of a step are over, so is the step."""
        if torch.is_grad_enabled() and len(self._losses) >= self._backwards:
            self.step()
        self.notes.called(module, args)


def _some(leaf: Tensor) -> Tensor:
    return counted(leaf).reshape(-1)[:_VALUES].clone()
