"""A callback for the Lightning Trainer that watches the model while it trains."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchhook.core.errors import StopTraining
from torchhook.core.findings import Report
from torchhook.core.optional import require
from torchhook.core.text import warn
from torchhook.core.torch_internals import scale_of
from torchhook.integrations.common import Layers
from torchhook.rules.registry import Choice
from torchhook.training.logs import Entry, Log, Target, targets
from torchhook.training.monitor import Monitor, OnFinding


def _package() -> str:
    """The name under which Lightning is installed: it comes as two packages with separate Callback classes."""
    is_new = "lightning.pytorch" in sys.modules or ("pytorch_lightning" not in sys.modules and find_spec("lightning"))
    return "lightning.pytorch" if is_new else "pytorch_lightning"


class TorchhookCallback(require(f"{_package()}.callbacks", "lightning", "TorchhookCallback").Callback):  # type: ignore[misc]  # Any
    """Watches every `fit` with a `Monitor` of its own, from the first step to the last.

        callback = TorchhookCallback(every=10, on_finding="stop")
        Trainer(callbacks=[callback]).fit(module)
        print(callback.report)       # the findings; callback.run is the folder, callback.monitor exists during training

    A step is an optimizer step, numbered as in Lightning's loggers; its loss is the mean over the accumulated batches.
    In manual optimization it is the sum of all losses that were backpropagated. With several optimizers, only the
    updates of the one with the most parameters are watched.

    Args:
        every, rules, to: As for `Monitor`, and so are `options`: `ignore`, `per_module`, `name`, `max_bytes`, `price`.
        on_finding: As for `Monitor`, except that ``"stop"`` makes the Trainer stop early, on all processes.
        layers: Globs of the layers whose statistics also go to the Trainer's loggers, as
            ``torchhook/<statistic>/<layer>``; ``()`` logs only those of the whole model, None logs nothing.
    """

    def __init__(
        self,
        every: int = 10,
        rules: Iterable[Choice] | None = None,
        to: Target | Iterable[Target] = "runs",
        *,
        on_finding: OnFinding | None = None,
        layers: str | Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        self.every, self.rules, self.to = every, rules, to
        self.on_finding = on_finding
        self.layers = None if layers is None else Layers(layers)
        self.options = options
        self.monitor: Monitor | None = None
        self.report: Report | None = None
        self.run: Path | None = None
        self._losses: deque[Tensor] = deque(maxlen=1000)  # of the accumulated batches
        self._steps = 0  # the Trainer's count at the last step that was seen
        self._is_broken = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is not None:
            return
        # The first batch: the sanity check is done, and the Trainer knows at which step it resumes.
        is_first, several = trainer.is_global_zero, trainer.optimizers
        self.monitor = Monitor(
            pl_module,
            _Optimizers(several) if len(several) > 1 else next(iter(several), None),
            self.every,
            self.rules,
            [*targets(self.to), *([_Loggers(trainer, self.layers)] if is_first and self.layers is not None else [])],
            on_finding=self.on_finding if is_first or self.on_finding == "stop" else None,
            first_step=_number(trainer),
            **self.options,
        )
        self.report, self.run = None, self.monitor.run
        self._steps, self._is_broken = trainer.global_step, False
        self._losses.clear()

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._losses.clear()  # LBFGS evaluates the loss several times per step

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)  # it has scaled the loss; its scale may change later
        scale = None if scaler is None or not scaler.is_enabled() else scale_of(scaler)
        self._losses.append((loss.detach() / (1 if scale is None else scale)).mean())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None or trainer.global_step == self._steps:  # still accumulating
            return
        self._steps, step = trainer.global_step, _number(trainer)
        try:
            self.monitor.step(self._loss(trainer, pl_module), step)
        except StopTraining as error:
            self._is_broken = True
            warn(f"stopping the training: {error}")
        if self.on_finding == "stop" and (trainer.world_size == 1 or step % self.every == 0):  # agreeing takes time
            trainer.should_stop |= trainer.strategy.reduce_boolean_decision(self._is_broken, all=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close("ended")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Lightning raises SystemExit when the machine asks it to stop.
        is_asked = isinstance(exception, (KeyboardInterrupt, SystemExit))
        self._close("interrupted" if is_asked else "failed", exception)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._close("interrupted")  # does nothing if one of the hooks above has closed it

    def _loss(self, trainer: Any, pl_module: Any) -> Tensor | None:
        """The loss of a step. Lightning always divides by accumulate_grad_batches, even if fewer batches are left."""
        if not self._losses:
            return None
        parts = torch.stack(list(self._losses))
        self._losses.clear()
        return parts.mean() * trainer.accumulate_grad_batches if pl_module.automatic_optimization else parts.sum()

    def _close(self, state: str, error: BaseException | None = None) -> None:
        monitor, self.monitor = self.monitor, None  # a callback may be copied; a monitor cannot
        if monitor is not None:
            monitor.close(state, error)
            self.report = monitor.report


def _number(trainer: Any) -> int:
    """The number of the step, as Lightning's own loggers count it."""
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


class _Loggers(Log):
    """Writes to the Trainer's loggers, which must be called from the training's own thread."""

    in_step: ClassVar[bool] = True

    def __init__(self, trainer: Any, layers: Layers) -> None:
        self._trainer, self._layers = trainer, layers

    def write(self, entry: Entry) -> None:
        scalars = self._layers.scalars(entry)
        for logger in self._trainer.loggers:
            logger.log_metrics(scalars, step=entry.step)


class _Optimizers:
    """Several optimizers as one: all their parameters are trained, and the steps of the largest are watched."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizer = max(optimizers, key=lambda one: sum(p.numel() for g in one.param_groups for p in g["params"]))
        self._all = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._all for group in optimizer.param_groups]
