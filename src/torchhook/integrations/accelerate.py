"""A monitor for training loops with Hugging Face accelerate."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchhook.core.errors import StopTraining
from torchhook.core.text import warn
from torchhook.integrations.common import Layers
from torchhook.rules.registry import Choice
from torchhook.training.logs import Entry, Log
from torchhook.training.monitor import Monitor, OnFinding


def monitored(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any = None,
    every: int = 10,
    rules: Iterable[Choice] | None = None,
    to: Iterable[Log | str | Path] = ("runs",),
    *,
    on_finding: OnFinding | None = None,
    layers: str | Iterable[str] | None = (),
    **options: Any,
) -> Monitor:
    """A `Monitor` of what an Accelerator has prepared, to be told of every batch: it knows when a step is over.

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

    A step is one of the optimizer, and its loss the mean of those of the batches that were accumulated.

    Args:
        every, rules, to: As for `Monitor`, and so are `options`: `ignore`, `per_module`, `name`, `max_mb`.
        on_finding: As for `Monitor`; but ``"stop"`` sets the trigger of the accelerator, for its `check_trigger`.
        layers: Globs of the layers whose numbers go to the trackers of the accelerator, too, as
            ``torchhook/<statistic>/<layer>``; ``()`` means those of the whole model alone, None nothing.
    """
    is_first = accelerator.is_main_process
    logs = [*to, *([_Trackers(accelerator, Layers(layers))] if is_first and layers is not None else [])]
    on_finding = on_finding if is_first or on_finding == "stop" else None
    return _Monitor(accelerator, model, optimizer, every, rules, logs, on_finding=on_finding, **options)


class _Monitor(Monitor):
    """Counts the steps of an accelerator that accumulates."""

    def __init__(self, accelerator: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._accelerator = accelerator
        self._parts: list[Tensor] = []

    def step(self, loss: Tensor | float | None = None, step: int | None = None) -> None:
        """A batch is over, and with the last of those that are accumulated, a step."""
        if loss is not None:
            self._parts.append(torch.as_tensor(loss).detach().mean())
        if not self._accelerator.sync_gradients:
            return
        parts, self._parts = self._parts, []
        try:
            super().step(torch.stack(parts).mean() if parts else None, step)
        except StopTraining as error:
            self._accelerator.set_trigger()
            warn(f"the training is to stop: {error}")


class _Trackers(Log):
    """The trackers of an accelerator, which are for its own thread."""

    in_step: ClassVar[bool] = True

    def __init__(self, accelerator: Any, layers: Layers) -> None:
        self._accelerator = accelerator
        self._layers = layers

    def write(self, entry: Entry) -> None:
        scalars = self._layers.scalars(entry) if self._accelerator.trackers else {}
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":  # which takes nothing of steps before its latest: into your next row
                tracker.log({"torchhook/step": entry.step, **scalars}, commit=False)
            else:
                tracker.log(scalars, step=entry.step)
