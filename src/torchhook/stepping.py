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
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchhook.core.event import Event
from torchhook.core.hooks import Removable, on_step
from torchhook.core.passes import Pass, Scope
from torchhook.core.selection import Selector
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Act, Sink, Tap, at_once
from torchhook.sinks.reduce import Cell, Reduce
from torchhook.sinks.shelf import Block, Shelf
from torchhook.stats import Moments, Stat
from torchhook.stats.kernels.plain import empty_moments, merged_moments, moments_of_each
from torchhook.stats.stat import counted
from torchhook.text import warn

NOTES = {
    "param": "as it was before the step",
    "param_grad": "of the whole step, before clipping (and before ranks average theirs), without a GradScaler's scale",
    "step_grad": "as the optimizer was given it: of the whole step, after clipping, without a GradScaler's scale",
    "update": "the change that the step made",
    "param_norm": "before the step; a value a step",
    "param_grad_norm": "of the whole step, before clipping; a value a step",
    "step_grad_norm": "as the optimizer was given it, after clipping; a value a step",
    "update_norm": "of the change that the step made; a value a step",
    "update_ratio": "the norm of the update over that of the parameter; a value a step",
}


class Drafts(Sink):
    """Measures gradients as they accumulate, each time anew, until the step says that they are whole."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.shelf = Shelf()
        self.whole = Shelf()
        self.cells: dict[str, tuple[Cell, Cell]] = {}  # by path: the draft, and what is whole

    def add(self, path: str, parameter: Tensor, stats: list[Stat]) -> Cell:
        """A parameter more."""
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
        if not self.steps.reduce.clock.active:
            return
        draft, whole = self.cells[path]
        if gradient.device not in draft.places:  # the model was moved
            self._place(draft, whole, gradient)
        if draft.seen:  # by an earlier micro-batch, whose part is in this gradient, too
            self._forget(draft)
        draft.update(self.steps.unscaled(gradient))
        if draft.failed:
            whole.stats, whole.failed = draft.stats, draft.failed

    def finish(self, keep: bool) -> dict[str, Tensor]:
        """The gradients are whole; their norms, as far as moments are collected. Without `keep`, forget them."""
        norms = self._norms() if keep else {}
        for path, (draft, whole) in self.cells.items():
            if draft.seen and self.steps.parameters[path].grad is None:  # thrown away since
                self._forget(draft)
                norms.pop(path, None)
            whole.seen = whole.seen or (keep and draft.seen)
            draft.seen = False
        for block, final in zip(self.shelf, self.whole, strict=True):
            if keep:
                final.add(block.states)
            block.reset()
        return norms

    def _norms(self) -> dict[str, Tensor]:
        rows: dict[Block, Tensor] = {}
        for block in self.shelf:
            if block.stat.key == Moments.name:
                moments = block.stat.settle(block.states[: block.used])
                count, nan, posinf, neginf, _, mean, _, m2, *_ = moments.unbind(1)
                rows[block] = (m2 + (count - nan - posinf - neginf) * mean * mean).sqrt()
        seen = {path: draft for path, (draft, _) in self.cells.items() if draft.seen}
        places = {path: list(draft.places.values())[-1].get(Moments.name) for path, draft in seen.items()}
        return {path: rows[place[0]][place[1]] for path, place in places.items() if place is not None}

    def _forget(self, draft: Cell) -> None:
        for places in draft.places.values():
            for block, number in places.values():
                block.states[number].copy_(block.empty)
        draft.seen = False

    def _place(self, draft: Cell, whole: Cell, x: Tensor) -> None:
        """Both get their states at once, so that those lie in the same places."""
        draft.turn_to(counted(x))
        whole.turn_to(counted(x))


class OverSteps(Moments):
    """Moments of a number a step: too few for the rows of a kernel."""

    def empty(self, x: Tensor) -> Tensor:
        return empty_moments(x.device)


class Numbers:
    """Statistics over steps of a number that each parameter has in a step."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self.cells: dict[tuple[str, str], Cell] = {}

    def cell(self, path: str, port: str) -> Cell:
        """Where the numbers of one parameter are added up."""
        name = f"the {port} of {path!r}"
        return self.cells.setdefault((path, port), Cell(self.shelf, [OverSteps()], name, note=NOTES[port]))

    def measure(self, port: str, values: dict[str, Tensor]) -> None:
        """Add those of one step, by path."""
        by_block: dict[Block, dict[int, Tensor]] = {}
        for path, value in values.items():
            cell = self.cell(path, port)
            cell.turn_to(value)
            cell.seen = True
            [(block, number)] = cell.places[value.device].values()
            by_block.setdefault(block, {})[number] = value
        for block, found in by_block.items():
            for numbers in _runs(sorted(found)):
                rows = moments_of_each(torch.stack([found[number] for number in numbers]))
                states = block.states[numbers.start : numbers.stop]
                states.copy_(merged_moments(torch.stack([states, rows])))


class Steps:
    """Measures around the steps of one optimizer."""

    def __init__(
        self, optimizer: Any, reduce: Reduce, selector: Selector, *, params: bool, param_grads: bool, updates: bool
    ) -> None:
        self.optimizer = unwrapped(optimizer)
        self.reduce = reduce
        self.selector = selector
        self.params, self.param_grads, self.updates = params, param_grads, updates
        self.drafts = Drafts(self)
        self.numbers = Numbers()
        self.parameters: dict[str, nn.Parameter] = {}
        self.before: dict[str, Tensor] = {}  # the values of parameters before the step
        self.scaler: GradScaler | None = None  # which multiplies the loss
        self.knows_scaler = False
        self.in_closure = False  # whether the gradients come during the step
        self.depth = 0  # of steps inside of steps: a class may call its parent's
        self._handles: list[Removable] = []

    def taps(self, group: str | None) -> list[Tap]:
        """What has to be seen while the model runs."""
        return [Tap(self.selector, self.drafts, "param_grad", group=group)] if self.param_grads else []

    def attach(self, session: Session) -> None:
        """Begin, on the model of an attached session."""
        self.parameters = session.parameters(self.selector)
        wanted = self.params or self.param_grads or self.updates
        if wanted and not self._stepped():
            raise ValueError("optimizer holds none of the parameters of what is measured; pass the one that trains it")
        for path, parameter in self.parameters.items():  # cells in the order in which they are to be read
            if wanted and is_lazy(parameter):
                raise ValueError(f"{path!r} has no values yet; run the model once before its parameters are measured")
            self._prepare(path, parameter)
        self.reduce.shelves += [self.drafts.whole, self.numbers.shelf]
        self._handles = on_step(self.optimizer, self.begin, self.end)

    def detach(self) -> None:
        """Leave the optimizer alone."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.before, self.scaler = [], {}, None

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer is about to step."""
        self.depth += 1
        if self.depth == 1 and self.reduce.clock.active:
            self.in_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
            self._guarded(self._look_before)

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """It has."""
        self.depth -= 1
        if self.depth == 0:
            if self.reduce.clock.active:
                self._guarded(self._look_after)
            self.reduce.clock.advance()

    def unscaled(self, gradient: Tensor) -> Tensor:
        """`gradient` without the scale of the loss."""
        if not self.knows_scaler:
            self.scaler, self.knows_scaler = only_scaler(), True
        if self.scaler is None or self.scaler._scale is None:
            return gradient
        return gradient / self.scaler._scale.to(gradient.device)

    def _guarded(self, look: Callable[[], None]) -> None:
        """To be looked at must not stop a training."""
        try:
            with torch.no_grad():
                look()
        except Exception as error:
            self.params = self.param_grads = self.updates = False
            self.before = {}
            warn(f"what the optimizer does is no longer measured, for that raised {type(error).__name__}: {error}")

    def _look_before(self) -> None:
        if self.params:
            for path, parameter in self.parameters.items():
                self._cell(path, "param").update(parameter)
        if self.updates:
            self.before = {path: counted(parameter).clone() for path, parameter in self._stepped().items()}
        if self.param_grads and not self.in_closure:
            self._look_at_gradients()

    def _look_after(self) -> None:
        if self.param_grads and self.in_closure:
            self._look_at_gradients()
        if self.before:
            before = list(self.before.values())
            now = [counted(self.parameters[path]) for path in self.before]
            updates = dict(zip(self.before, torch._foreach_sub(now, before), strict=True))
            for path, update in updates.items():
                self._cell(path, "update").update(update)
            norms, changes = _norms(self.before), _norms(updates)
            self.numbers.measure("param_norm", norms)
            self.numbers.measure("update_norm", changes)
            self.numbers.measure("update_ratio", {path: changes[path] / norms[path] for path in norms})
            self.before = {}

    def _look_at_gradients(self) -> None:
        scaler = scaler_that_steps()
        norms = self.drafts.finish(keep=scaler is self.scaler)  # or they were taken for scaled otherwise than they are
        self.numbers.measure("param_grad_norm", norms)
        self.scaler, self.knows_scaler = scaler, True
        left = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer takes the scale off itself
        found = {path: counted(p.grad) for path, p in self._stepped().items() if p.grad is not None}
        found = {path: gradient if left is None else gradient / left for path, gradient in found.items()}
        for path, gradient in found.items():
            self._cell(path, "step_grad").update(gradient)
        self.numbers.measure("step_grad_norm", _norms(found))

    def _stepped(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer has now."""
        own = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        return {path: parameter for path, parameter in self.parameters.items() if id(parameter) in own}

    def _prepare(self, path: str, parameter: nn.Parameter) -> None:
        cells = self.reduce.cells
        if self.params:
            self._cell(path, "param")
        if self.param_grads and parameter.requires_grad:
            stats = [stat.bound(None) for stat in self.reduce.stats]
            cells[path, "param_grad"] = self.drafts.add(path, parameter, stats)
            cells[path, "param_grad_norm"] = self.numbers.cell(path, "param_grad_norm")
            self._cell(path, "step_grad")
            cells[path, "step_grad_norm"] = self.numbers.cell(path, "step_grad_norm")
        if self.updates:
            self._cell(path, "update")
            for port in ("param_norm", "update_norm", "update_ratio"):
                cells[path, port] = self.numbers.cell(path, port)

    def _cell(self, path: str, port: Any) -> Cell:
        cell = self.reduce.cell(Site(path, port), None)
        cell.note = NOTES[port]
        return cell


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside of what others put around it."""
    inside = optimizer
    for _ in range(8):
        if isinstance(inside, Optimizer) and not isinstance(getattr(inside, "optimizer", None), Optimizer):
            return inside
        inside = getattr(inside, "optimizer", None)
    raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r:.80}")


def only_scaler() -> GradScaler | None:
    """The GradScaler that has scaled something, if it is just one: nobody tells before the first step which it is."""
    found = [known for known in gc.get_objects() if issubclass(type(known), GradScaler)]
    used = [scaler for scaler in found if scaler.is_enabled() and scaler._scale is not None]
    return used[0] if len(used) == 1 else None


def scaler_that_steps() -> GradScaler | None:
    """The GradScaler that has called the optimizer, if one has."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(16):
        if frame is None:
            break
        if frame.f_code in _STEPS:  # asking any other for its variables would keep those alive
            scaler: GradScaler = frame.f_locals["self"]
            return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None


_STEPS = (GradScaler.step.__code__, GradScaler._maybe_opt_step.__code__)


def _norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    if not tensors:
        return {}
    return dict(zip(tensors, torch._foreach_norm(list(tensors.values()), 2, torch.float64), strict=True))


def _runs(numbers: list[int]) -> list[range]:
    """Numbers in order as ranges without gaps.

    >>> _runs([0, 1, 2, 5])
    [range(0, 3), range(5, 6)]
    """
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
