"""Measures parameters before and after each step of an optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchhook.core.hooks.registration import Removable, on_step
from torchhook.core.selection import Selector
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.core.text import warn
from torchhook.core.torch_internals import add_to_each, negate_each, scale_of, subtract_from_each
from torchhook.stats.cell import Cell
from torchhook.stats.clock import Clock
from torchhook.stats.optimizer.drafts import Drafts
from torchhook.stats.optimizer.notes import NOTES
from torchhook.stats.optimizer.numbers import Numbers, norms_of
from torchhook.stats.optimizer.scaling import only_scaler, scaler_that_steps
from torchhook.stats.reduce import Reduce
from torchhook.stats.stat import counted


class Steps:
    """Measures what happens around the steps of one optimizer.

    With `norms_alone`, only the norms of the step gradients and of the updates are measured, and those of the updates
    only in steps that the clock `seldom` measures. No time is spent then on looking for a GradScaler before it steps:
    gradients that turn out to be scaled are measured once more, as the optimizer gets them.
    """

    def __init__(
        self,
        optimizer: Any,
        reduce: Reduce,
        selector: Selector,
        *,
        params: bool,
        param_grads: bool,
        updates: bool,
        norms_alone: bool = False,
        seldom: Clock | None = None,
    ) -> None:
        self.optimizer = unwrapped(optimizer)
        self.reduce = reduce
        self.selector = selector
        self.params, self.param_grads, self.updates = params, param_grads, updates
        self.norms_alone = norms_alone
        self.seldom = seldom or reduce.clock
        self.drafts = Drafts(self)
        self.numbers = Numbers()
        self._noted: dict[tuple[str, str], Tensor] = {}  # numbers of the step that runs now, by path and port
        self.parameters: dict[str, nn.Parameter] = {}
        self.before: dict[str, Tensor] = {}  # the parameters before the step
        self._scaler: GradScaler | None = None  # that multiplies the loss, as far as is known
        self._knows_scaler = False
        self.in_closure = False  # whether a closure computes the gradients during the step
        self.depth = 0  # of nested steps: an optimizer may call the step of its parent class
        self._handles: list[Removable] = []

    def taps(self, group: str | None) -> list[Tap]:
        """The taps for what has to be measured while the model runs."""
        return [Tap(self.selector, self.drafts, "param_grad", group=group)] if self.param_grads else []

    def attach(self, session: Session) -> None:
        """Begin to measure, on the model of an attached session."""
        self.parameters = session.parameters(self.selector)
        wanted = self.params or self.param_grads or self.updates
        if wanted and not self.parameters:
            raise ValueError(f"nothing that {self.selector.label} selects has parameters")
        if wanted and not self._stepped():
            raise ValueError("optimizer holds none of the parameters that are measured; pass the one that trains them")
        for path, parameter in self.parameters.items():  # cells are created in the order in which they are read
            if wanted and is_lazy(parameter):
                raise ValueError(f"{path!r} has no values yet; run the model once before you measure its parameters")
            self._prepare(path, parameter)
        self.reduce.shelves += [self.drafts.whole, self.numbers.shelf]
        if _steps_under_way():  # whose closure runs now; we see its end
            self.depth, self.in_closure = 1, True
        self._handles = on_step(self.optimizer, self.begin, self.end)

    def detach(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.before, self._noted, self._scaler, self._knows_scaler = [], {}, {}, None, True

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer is about to step."""
        self.depth = self.depth + 1 if self.depth and is_inside_a_step() else 1  # a step that raised has not ended
        if self.depth == 1 and self.reduce.clock.active:
            self.in_closure = kwargs.get("closure") is not None or any(map(callable, args[1:]))
            self._guarded(self._look_before)

    def end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer has stepped."""
        self.depth -= 1
        if self.depth == 0:
            if self.reduce.clock.active:
                self._guarded(self._look_after)
            self.reduce.clock.advance()

    @property
    def scaler(self) -> GradScaler | None:
        """The GradScaler that multiplies the loss; all objects are searched for it if no step has shown it yet."""
        if not self._knows_scaler:
            self._scaler, self._knows_scaler = only_scaler(), True
        return self._scaler

    def unscaled(self, x: Tensor) -> Tensor:
        """A loss or a gradient without the scale of the loss."""
        return _divided(x, self.scaler)

    def drafted(self, gradient: Tensor) -> Tensor:
        """A gradient that has just been accumulated, without the scale of the loss, as far as it is to be known now."""
        return _divided(gradient, self._scaler if self.norms_alone else self.scaler)

    def _guarded(self, look: Callable[[], None]) -> None:
        """Call `look`, but never raise: measuring must not stop a training."""
        try:
            with torch.no_grad():
                look()
        except Exception as error:
            self.params = self.param_grads = self.updates = False
            self.before, self._noted = {}, {}
            warn(f"stopped measuring the optimizer: {type(error).__name__}: {error}")

    def _look_before(self) -> None:
        if self.params:
            for path, parameter in self.parameters.items():
                self._cell(path, "param").update(parameter)
        if self.updates and self.seldom.active:
            self.before = {path: counted(parameter).clone() for path, parameter in self._stepped().items()}
        if self.param_grads and not self.in_closure:
            self._look_at_gradients()

    def _look_after(self) -> None:
        if self.param_grads and self.in_closure:
            self._look_at_gradients()
        if self.before:
            norms = self._norms(self.before)
            updates, self.before = self.before, {}
            now = [counted(self.parameters[path]) for path in updates]
            if self.norms_alone:  # the sign does not matter
                subtract_from_each(list(updates.values()), now)
            else:
                negate_each(list(updates.values()))
                add_to_each(list(updates.values()), now)
                for path, update in updates.items():
                    self._cell(path, "update").update(update)
            changes = self._norms(updates)
            self._note("param_norm", norms)
            self._note("update_norm", changes)
            self._note("update_ratio", {path: changes[path] / norms[path] for path in norms})
        self.numbers.measure(self._noted)
        self._noted = {}

    def _look_at_gradients(self) -> None:
        left = getattr(self.optimizer, "grad_scale", None)  # a fused optimizer removes the scale itself
        found = {path: counted(p.grad) for path, p in self._stepped().items() if p.grad is not None}
        found = {path: gradient if left is None else gradient / left for path, gradient in found.items()}
        scaler = scaler_that_steps()
        if scaler is not self._scaler:
            self._scaler = None
            self.drafts.finish(keep=False)  # which had the wrong scale
            for path, gradient in found.items() if self.norms_alone else ():
                self.drafts.measure(path, gradient)
        self._scaler, self._knows_scaler = scaler, True
        self._note("param_grad_norm", self.drafts.finish(keep=True))
        if not self.norms_alone:
            for path, gradient in found.items():
                self._cell(path, "step_grad").update(gradient)
        self._note("step_grad_norm", self._norms(found))

    def _note(self, port: str, values: dict[str, Tensor]) -> None:
        """Keep numbers until the step has ended."""
        self._noted.update({(path, port): value for path, value in values.items()})

    def _norms(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return norms_of(tensors, quick=self.norms_alone)

    def _stepped(self) -> dict[str, nn.Parameter]:
        """The measured parameters that the optimizer holds now."""
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
            if not self.norms_alone:
                self._cell(path, "step_grad")
            cells[path, "step_grad_norm"] = self.numbers.cell(path, "step_grad_norm")
        if self.updates:
            if not self.norms_alone:
                self._cell(path, "update")
            for port in ("param_norm", "update_norm", "update_ratio"):
                cells[path, port] = self.numbers.cell(path, port)

    def _cell(self, path: str, port: Any) -> Cell:
        cell = self.reduce.cell(Site(path, port), None)
        cell.note = NOTES[port]
        return cell


def _divided(x: Tensor, scaler: GradScaler | None) -> Tensor:
    scale = None if scaler is None else scale_of(scaler)
    return x if scale is None else x / scale.to(x.device)


def is_inside_a_step() -> bool:
    """Whether the current step was called by another step."""
    return _steps_under_way() > 1


def _steps_under_way() -> int:
    """How many steps of optimizers run now, one inside the other."""
    frame: FrameType | None = sys._getframe(1)
    steps = 0
    while frame is not None:
        steps += frame.f_code is _STEP
        frame = frame.f_back
    return steps


_STEP = Optimizer.profile_hook_step(lambda: None).__code__  # torch wraps every step in it


def unwrapped(optimizer: Any) -> Optimizer:
    """The torch optimizer inside the wrappers of other libraries."""
    inside = optimizer
    for _ in range(8):
        if isinstance(inside, Optimizer) and not isinstance(getattr(inside, "optimizer", None), Optimizer):
            return inside
        inside = getattr(inside, "optimizer", None)
    raise TypeError(f"optimizer must be a torch.optim.Optimizer, not {optimizer!r:.80}")
