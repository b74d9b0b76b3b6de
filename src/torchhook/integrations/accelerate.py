"""A monitor for training loops with Hugging Face accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchhook.core.errors import StopTraining
from torchhook.core.text import warn
from torchhook.integrations.common import Layers
from torchhook.rules.registry import Choice
from torchhook.training.logs import Entry, Log, Target, targets
from torchhook.training.monitor import Monitor, OnFinding


def monitored(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any = None,
    every: int = 10,
    rules: Iterable[Choice] | None = None,
    to: Target | Iterable[Target] = "runs",
    *,
    on_finding: OnFinding | None = None,
    layers: str | Iterable[str] | None = (),
    **options: Any,
) -> Monitor:
    """A `Monitor` for what an Accelerator has prepared. Call its `step` after every batch: it knows when a step ends.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        with monitored(accelerator, model, optimizer, every=10, on_finding="stop") as monitor:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                monitor.step(loss)
                if accelerator.check_trigger():
                    break

    A step is an optimizer step; its loss is the mean over the accumulated batches.

    Args:
        every, rules, to: As for `Monitor`, and so are `options`: `ignore`, `per_module`, `name`, `max_bytes`, `price`.
        on_finding: As for `Monitor`, except that ``"stop"`` sets the accelerator's trigger, for `check_trigger`.
        layers: Globs of the layers whose statistics also go to the accelerator's trackers, as
            ``torchhook/<statistic>/<layer>``; ``()`` logs only those of the whole model, None logs nothing.
    """
    is_first = accelerator.is_main_process
    logs = [*targets(to), *([_Trackers(accelerator, Layers(layers))] if is_first and layers is not None else [])]
    on_finding = on_finding if is_first or on_finding == "stop" else None
    return _AccumulatingMonitor(accelerator, model, optimizer, every, rules, logs, on_finding=on_finding, **options)


class _AccumulatingMonitor(Monitor):
    """Counts optimizer steps, not batches, when the accelerator accumulates gradients."""

    def __init__(self, accelerator: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._accelerator = accelerator
        self._parts: list[Tensor] = []

    def step(self, loss: Tensor | float | None = None, step: int | None = None) -> None:
        """End a batch, and the step if its gradients are the last to be accumulated."""
        if loss is not None:
            self._parts.append(torch.as_tensor(loss).detach().mean())
        if not self._accelerator.sync_gradients:
            return
        parts, self._parts = self._parts, []
        try:
            super().step(torch.stack(parts).mean() if parts else None, step)
        except StopTraining as error:
            self._accelerator.set_trigger()
            warn(f"triggered the accelerator to stop the training: {error}")


class _Trackers(Log):
    """Writes to the accelerator's trackers, which must be called from the training's own thread."""

    in_step: ClassVar[bool] = True

    def __init__(self, accelerator: Any, layers: Layers) -> None:
        self._accelerator = accelerator
        self._layers = layers

    def write(self, entry: Entry) -> None:
        scalars = self._layers.scalars(entry) if self._accelerator.trackers else {}
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":  # it drops steps before its latest, so this goes into your next row
                tracker.log({"torchhook/step": entry.step, **scalars}, commit=False)
            else:
                tracker.log(scalars, step=entry.step)
