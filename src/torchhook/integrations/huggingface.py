"""A callback for the Hugging Face Trainer that watches the model while it trains."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.errors import StopTraining
from torchhook.core.event import Event
from torchhook.core.findings import Report
from torchhook.core.optional import require
from torchhook.core.session import Session
from torchhook.core.tap import Tap
from torchhook.core.text import warn
from torchhook.core.torch_internals import scale_of
from torchhook.core.trees import leaves
from torchhook.rules.registry import Choice
from torchhook.training.logs import Target
from torchhook.training.monitor import Monitor, OnFinding, state_of

_LOSS = (("loss",), (0,))  # where the Trainer looks for it in the model's output


class TorchhookCallback(require("transformers", "huggingface", "TorchhookCallback").TrainerCallback):  # type: ignore[misc]  # Any
    """Watches every `train` with a `Monitor` of its own, from the first step to the last.

        callback = TorchhookCallback(every=10, on_finding="stop")
        Trainer(model, args, callbacks=[callback], ...).train()
        print(callback.report)       # the findings; callback.run is the folder, callback.monitor exists during training

    A step is an optimizer step, numbered as the Trainer logs it. Its loss is the one that the model returned and the
    Trainer minimized. If the Trainer computes the loss from other outputs, it is known only from the Trainer's logs,
    one step late.

    A Trainer does not notify callbacks when it fails: the run is marked as failed, and the hooks are removed, when
    `train` is called next or Python exits. Use the callback as a context manager to do both at the end of the block:

        with TorchhookCallback() as callback:
            Trainer(model, args, callbacks=[callback], ...).train()

    Args:
        every, rules, to: As for `Monitor`, and so are `options`: `ignore`, `per_module`, `name`, `max_bytes`, `price`.
        on_finding: As for `Monitor`, except that ``"stop"`` makes the Trainer stop early, on all processes.
    """

    def __init__(
        self,
        every: int = 10,
        rules: Iterable[Choice] | None = None,
        to: Target | Iterable[Target] = "runs",
        *,
        on_finding: OnFinding | None = None,
        **options: Any,
    ) -> None:
        self.every, self.rules, self.to = every, rules, to
        self.on_finding = on_finding
        self.options = options
        self.monitor: Monitor | None = None
        self.report: Report | None = None
        self.run: Path | None = None
        self._losses: _Losses | None = None
        self._is_broken = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close("failed")  # a monitor that is still open belongs to a training that failed
        self.monitor = Monitor(
            kwargs["model"],
            kwargs["optimizer"],
            self.every,
            self.rules,
            self.to,
            on_finding=self.on_finding if state.is_world_process_zero or self.on_finding == "stop" else None,
            first_step=state.global_step + 1,
            **self.options,
        )
        self.report, self.run = None, self.monitor.run
        self._losses, self._is_broken = _Losses(kwargs["model"], kwargs["optimizer"]), False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._losses is not None and logs is not None:
            self._losses.logged = logs.get("loss")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.monitor is None or self._losses is None:
            return
        step = state.global_step + 1  # the Trainer counts it later, when the learning rate has changed already
        try:
            self.monitor.step(self._losses.taken(), step)
        except StopTraining as error:
            self._is_broken = True
            warn(f"stopping the training: {error}")
        if self.on_finding == "stop" and (args.world_size == 1 or step % self.every == 0):  # agreeing takes time
            control.should_training_stop |= self._agreed(args)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self, state: str = "ended", error: BaseException | None = None) -> None:
        """Stop watching and make the report; `error` is what the training failed with. Further calls do nothing."""
        monitor, self.monitor = self.monitor, None
        if monitor is not None and self._losses is not None:
            self._losses.close()
            monitor.close(state, error)
            self.report = monitor.report

    def __enter__(self) -> TorchhookCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(state_of(error), error)

    def _agreed(self, args: Any) -> bool:
        """Whether any process found an error: they must stop together, or they would wait for each other forever."""
        broken = torch.tensor(int(self._is_broken), device=args.device)
        if args.world_size > 1:
            torch.distributed.all_reduce(broken, torch.distributed.ReduceOp.MAX)
        return bool(broken)


class _Losses:
    """The loss of each step, which the Trainer does not pass to callbacks.

    The Trainer scales the loss that the model returned by factors that only it knows: accumulated batches, tokens,
    processes. Their product is the gradient that arrives at that loss.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.logged: float | None = None
        self._scaler = getattr(optimizer, "scaler", None)
        self._returned: dict[tuple[int, int], Tensor] = {}
        self._parts: list[Tensor] = []
        self._is_known = False
        taps = [Tap("", self._see, "output"), Tap("", self._weigh, "grad_output")]
        self.close = Session(model, taps, scope="all", on_silent="ignore").open().abandon

    def taken(self) -> Tensor | float | None:
        """The loss of the step that has just ended."""
        parts, self._parts = self._parts, []
        logged, self.logged = self.logged, None
        self._returned.clear()
        self._is_known |= bool(parts)
        return torch.stack(parts).sum() if parts else None if self._is_known else logged

    def _see(self, event: Event) -> None:
        for leaf, value in leaves(event.live):
            if leaf in _LOSS and value.numel() == 1 and value.requires_grad:
                self._returned[event.pass_number, event.call] = value.detach().clone()  # the Trainer scales it in place

    def _weigh(self, event: Event) -> None:
        returned = self._returned.get((event.pass_number, event.call))
        if event.leaf in _LOSS and returned is not None:
            scale = 1 if self._scaler is None or not self._scaler.is_enabled() else scale_of(self._scaler)
            self._parts.append((returned * event.value / scale).reshape(()))
