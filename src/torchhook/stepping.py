"""What an optimizer does to parameters: their values, the gradients it is given, the updates it makes.

Gradients are measured twice. While a backward accumulates them, each into a draft that the next micro-batch replaces:
so when the optimizer steps, the draft is of the whole step, before clipping. And right before the step, after it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchhook.core.event import Event
from torchhook.core.hooks import Removable, on_step
from torchhook.core.passes import Pass, Scope
from torchhook.core.selection import Selector
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Act, Sink, Tap, at_once
from torchhook.sinks.reduce import Cell, Reduce, counted
from torchhook.sinks.shelf import Block, Shelf
from torchhook.stats import Moments
from torchhook.stats.kernels.plain import merged_moments, moments_of_each
from torchhook.text import warn

NOTES = {
    "param": "as it was before the step",
    "param_grad": "of the whole step, before clipping, without the loss scale",
    "step_grad": "as the optimizer was given it: of the whole step, after clipping, without the loss scale",
    "update": "the change that the step made",
    "update_ratio": "the norm of the update over that of the parameter; a value a step",
}


class Drafts(Sink):
    """Measures gradients as they accumulate, each time anew, until the step says that they are whole."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.shelf = Shelf()
        self.whole = Shelf()
        self.cells: dict[str, tuple[Cell, Cell]] = {}  # by path: the draft, and what is whole

    def add(self, path: str, parameter: Tensor) -> Cell:
        """A parameter more."""
        stats = [stat.bound(None) for stat in self.steps.reduce.stats]
        name = f"the param_grad of {path!r}"
        both = Cell(self.shelf, stats, name), Cell(self.whole, stats, name, note=NOTES["param_grad"])
        self._place(*both, parameter)
        self.cells[path] = both
        return both[1]

    def receive(self, event: Event) -> None:
        """Measure one gradient. (In a session, acts bound for each site do this without events.)"""
        self.measure(event.path, event.value)

    def bind(self, tap: Tap, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act that measures the gradient of one parameter."""

        def see(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
            self.measure(site.path, value)

        return at_once(see)

    def measure(self, path: str, gradient: Tensor) -> None:
        """The gradient of the parameter at `path` is this now."""
        if not self.steps.clock.active:
            return
        draft, whole = self.cells[path]
        if gradient.device not in draft.places:  # the model was moved
            self._place(draft, whole, gradient)
        if draft.seen:  # by an earlier micro-batch, whose part is in this gradient, too
            self._forget(draft)
        draft.update(self.steps.unscaled(gradient))
        if draft.failed:
            whole.stats, whole.failed = draft.stats, draft.failed

    def _forget(self, draft: Cell) -> None:
        for places in draft.places.values():
            for block, number in places.values():
                block.states[number].copy_(block.empty)
        draft.seen = False

    def _place(self, draft: Cell, whole: Cell, x: Tensor) -> None:
        """Both get their states at once, so that those lie in the same places."""
        draft.turn_to(counted(x))
        whole.turn_to(counted(x))

    def finish(self, keep: bool) -> None:
        """The gradients are whole. Without `keep`, forget them."""
        for path, (draft, whole) in self.cells.items():
            if draft.seen and self.steps.parameters[path].grad is None:  # thrown away since
                self._forget(draft)
            whole.seen = whole.seen or (keep and draft.seen)
            draft.seen = False
        for block, final in zip(self.shelf, self.whole, strict=True):
            if keep:
                final.add(block.states)
            block.reset()


class Ratios:
    """The norms of updates over those of their parameters: a number each, a step."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.cells: list[Cell] = []
        self.members: dict[Block, list[int]] = {}

    def add(self, path: str, parameter: Tensor) -> Cell:
        """A parameter more."""
        cell = Cell(self.shelf, [Moments()], f"the update_ratio of {path!r}", note=NOTES["update_ratio"])
        cell.turn_to(counted(parameter))
        [(block, _)] = cell.places[parameter.device].values()
        self.members.setdefault(block, []).append(len(self.cells))
        self.cells.append(cell)
        return cell

    def measure(self, updates: list[Tensor], before: list[Tensor]) -> None:
        """Add those of one step."""
        for block, members in self.members.items():
            changes = torch._foreach_norm([updates[member] for member in members], 2, torch.float64)
            norms = torch._foreach_norm([before[member] for member in members], 2, torch.float64)
            rows = moments_of_each(torch.stack(changes) / torch.stack(norms))
            states = block.states[: block.used]
            first = states if states.dim() == 2 else states[:, 0]
            first.copy_(merged_moments(torch.stack([first, rows])))
        for cell in self.cells:
            cell.seen = True


class Steps:
    """Measures around the steps of one optimizer."""

    def __init__(
        self, optimizer: Any, reduce: Reduce, selector: Selector, *, params: bool, param_grads: bool, updates: bool
    ) -> None:
        self.optimizer = unwrapped(optimizer)
        self.selector = selector
        self.reduce = reduce
        assert reduce.clock is not None
        self.clock = reduce.clock
        self.wants = {"param": params, "param_grad": param_grads, "step_grad": param_grads, "update": updates}
        self.drafts = Drafts(self)
        self.ratios = Ratios()
        self.parameters: dict[str, nn.Parameter] = {}
        self.stepped: dict[str, nn.Parameter] = {}  # those that the optimizer has
        self.before: list[Tensor] = []  # the values of those before the step
        self.scaler = only_scaler() if param_grads else None  # which may multiply the loss
        self.in_closure = False  # whether the gradients come during the step
        self._handles: list[Removable] = []

    def taps(self, group: str | None) -> list[Tap]:
        """What has to be seen while the model runs."""
        return [Tap(self.selector, self.drafts, "param_grad", group=group)] if self.wants["param_grad"] else []

    def attach(self, session: Session) -> None:
        """Begin, on the model of an attached session."""
        self.parameters = session.parameters(self.selector)
        own = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        self.stepped = {path: parameter for path, parameter in self.parameters.items() if id(parameter) in own}
        if not self.stepped and any(self.wants.values()):
            raise ValueError("optimizer holds none of the parameters of what is measured; pass the one that trains it")
        for path, parameter in self.parameters.items():  # cells in the order in which they are to be read
            if self.wants["param"]:
                self._cell(path, "param")
            if self.wants["param_grad"] and parameter.requires_grad:
                self.reduce.cells[path, "param_grad"] = self.drafts.add(path, parameter)
                self._cell(path, "step_grad")
            if self.wants["update"] and path in self.stepped:
                self._cell(path, "update")
                self.reduce.cells[path, "update_ratio"] = self.ratios.add(path, parameter)
        self.reduce.shelves += [self.drafts.whole, self.ratios.shelf]
        self._handles = on_step(self.optimizer, self.begin, self.end)

    def detach(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.before = [], []

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer is about to step."""
        self.in_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
        if self.clock.active:
            self._guarded(self._look_before)

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """It has."""
        if self.clock.active:
            self._guarded(self._look_after)
        self.clock.advance()

    def unscaled(self, gradient: Tensor) -> Tensor:
        """`gradient` without the scale of the loss."""
        scale = scale_of(self.scaler)
        return gradient if scale is None else gradient / scale.to(gradient.device)

    def _guarded(self, look: Callable[[], None]) -> None:
        """To be looked at must not stop a training."""
        try:
            look()
        except Exception as error:
            self.wants = dict.fromkeys(self.wants, False)
            self.before = []
            warn(f"what the optimizer does is no longer measured, for that raised {type(error).__name__}: {error}")

    def _look_before(self) -> None:
        if self.wants["param"]:
            for path, parameter in self.parameters.items():
                self._cell(path, "param").update(parameter)
        if self.wants["update"]:
            self.before = [counted(parameter).clone() for parameter in self.stepped.values()]
        if self.wants["param_grad"] and not self.in_closure:
            self._look_at_gradients()

    def _look_after(self) -> None:
        if self.wants["param_grad"] and self.in_closure:
            self._look_at_gradients()
        if self.before:
            now = [counted(parameter) for parameter in self.stepped.values()]
            updates = list(torch._foreach_sub(now, self.before))
            for path, update in zip(self.stepped, updates, strict=True):
                self._cell(path, "update").update(update)
            self.ratios.measure(updates, self.before)
            self.before = []

    def _look_at_gradients(self) -> None:
        scaler = scaler_that_steps()
        assumed = self.scaler if scale_of(self.scaler) is not None else None
        self.drafts.finish(keep=scaler is assumed)
        self.scaler = scaler
        left = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer takes the scale off itself
        for path, parameter in self.stepped.items():
            if parameter.grad is not None:
                gradient = counted(parameter.grad)
                self._cell(path, "step_grad").update(gradient if left is None else gradient / left)

    def _cell(self, path: str, port: Any) -> Cell:
        return self.reduce.cell(Site(path, port), None, note=NOTES[port])


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside of what others put around it."""
    while not isinstance(optimizer, Optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r:.80}")
    return optimizer


def only_scaler() -> GradScaler | None:
    """The GradScaler of this process, if it has just one: it is not told before the first step which one it is."""
    found = [known for known in gc.get_objects() if issubclass(type(known), GradScaler) and known.is_enabled()]
    return found[0] if len(found) == 1 else None


def scaler_that_steps() -> GradScaler | None:
    """The GradScaler that has called the optimizer, if one has."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            break
        if frame.f_code in _STEPS:  # asking any other for its variables would keep those alive
            scaler: GradScaler = frame.f_locals["self"]
            return scaler
        frame = frame.f_back
    return None


def scale_of(scaler: GradScaler | None) -> Tensor | None:
    """By what it multiplies the loss, None if it never has."""
    return None if scaler is None else scaler._scale


_STEPS = (GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__)
