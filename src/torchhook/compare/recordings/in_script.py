"""Records the model of a script that knows nothing of it: the first outermost module with parameters that is called."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from torchhook.compare.recordings.files import Keep
from torchhook.compare.recordings.recorder import Recorder
from torchhook.core.hooks.registration import on_any_step
from torchhook.core.selection import unwrapped
from torchhook.training.launch.patches import patched


class ScriptRecorder:
    """While it is entered, waits for the model to be called, and records it from that call on.

    Args:
        kind: The name of the model's class; by default, the first module with parameters is the model.
    """

    def __init__(
        self,
        to: Path,
        sites: Sequence[str] | None = None,
        kind: str | None = None,
        grads: bool = False,
        keep: Keep = "all",
        steps: int | None = 1,
    ) -> None:
        self.recorder: Recorder | None = None
        self.failure: Exception | None = None  # why the model could not be recorded
        self._to = to
        self._sites = sites
        self._kind = kind
        self._grads = grads
        self._keep: Keep = keep
        self._steps = steps
        self._waiting = ExitStack()
        self._attached = ExitStack()

    def __enter__(self) -> ScriptRecorder:
        self._waiting.enter_context(patched(nn.Module, "__call__", before=self._called))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._waiting.close()
        self._attached.close()

    def _called(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """A module is called; if it is the model, record it from now on."""
        if self.recorder is not None or not self._is_model(module):
            return
        self._waiting.close()
        self.recorder = Recorder(
            module, self._to, self._sites, self._grads, keep=self._keep, steps=self._steps, counts=self._grads
        )
        try:
            self._attached.enter_context(self.recorder)
        except Exception as error:  # a fault of ours, or of an option, must not stop the script
            self.failure = error
            return
        for handle in on_any_step(_nothing, self._stepped) if self._grads else ():
            self._attached.callback(handle.remove)

    def _is_model(self, module: nn.Module) -> bool:
        if torch.compiler.is_compiling() or isinstance(module, torch.jit.ScriptModule):
            return False
        if self._kind is not None:
            return type(unwrapped(module)).__name__ == self._kind
        return next(module.parameters(), None) is not None

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped; if it trains the model, that was one of its steps."""
        assert self.recorder is not None
        own = set(map(id, self.recorder.model.parameters()))
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self.recorder.count_step()


def _nothing(*_: Any) -> None:
    pass
