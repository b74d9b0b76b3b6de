"""`record`: write what flows through a model to disk, for `diff` against another process, version or machine."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.facts import facts_of
from torchhook.captures.agreement.recorded_run import CopiedOutputs, everywhere, parameters_of, unchanged
from torchhook.captures.agreement.rounding import precision
from torchhook.compare.recordings.files import VERSION, About, Keep, Line, write_noise
from torchhook.compare.recordings.noise import moved_by_rounding
from torchhook.compare.recordings.recording import RANK, RecordedRank, Recording, to_json
from torchhook.compare.recordings.writer import RecordingWriter
from torchhook.compare.task import task_of
from torchhook.core.batch import fitted, on_device
from torchhook.core.event import Event
from torchhook.core.hooks.registration import on_step
from torchhook.core.lifetime import Attaching
from torchhook.core.selection import Query, Selector, require_module, unwrapped, walk
from torchhook.core.session import Session
from torchhook.core.shards import local, placements, shards_of_gathered
from torchhook.core.site import Port
from torchhook.core.snapshot import snapshot
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import warn
from torchhook.core.trees import Arguments, leaves
from torchhook.training.process import rank, world_size


@overload
def record(
    model: nn.Module,
    x: None = None,
    *,
    to: str | os.PathLike[str],
    sites: Query | Iterable[Query] | None = None,
    grads: bool = False,
    optimizer: Any = None,
    steps: int | None = None,
    keep: Keep = "all",
) -> Recorder: ...


@overload
def record(
    model: nn.Module,
    x: Any,
    *,
    to: str | os.PathLike[str],
    loss: Callable[..., Tensor] | None = None,
    sites: Query | Iterable[Query] | None = None,
    keep: Keep = "all",
    noise: bool | None = None,
) -> Recording: ...


def record(
    model: nn.Module,
    x: Any = None,
    *,
    to: str | os.PathLike[str],
    loss: Callable[..., Tensor] | None = None,
    sites: Query | Iterable[Query] | None = None,
    grads: bool = False,
    optimizer: Any = None,
    steps: int | None = None,
    keep: Keep = "all",
    noise: bool | None = None,
) -> Recording | Recorder:
    """Write what flows through `model` to the folder `to`, so that `diff` can compare it with another recording.

    With `x`, run the model on it once, as it is (train or eval mode), and return the `Recording`. Without, use it as
    a context manager, ``with record(model, to="a.th"):``, around any code that calls the model. In a process group,
    each rank writes a part of the same recording.

    Args:
        x: An input, a tuple of positional arguments, or a dict of keyword arguments. With a `loss` of output and
            target, the target is the last element of the tuple.
        to: A new folder, usually named ``something.th``.
        loss: Also record gradients, backward from this loss.
        sites: The modules to record, besides the model itself; all of them by default.
        grads: In a ``with`` block, also record the gradients of the user's own backwards.
        optimizer: In a ``with`` block, number the steps of this optimizer, and record the parameters before each.
        steps: In a ``with`` block, record so many steps (without an optimizer: passes of the model), and then no more.
        keep: ``"all"`` keeps every tensor. ``"sketch"`` keeps a few kilobytes of each, which still tell rounding from
            a mistake.
        noise: Whether to run the model twice more, with noise as large as rounding errors, to learn how far rounding
            can move each value: `diff` then finds smaller mistakes. By default, if tensors are kept.

    >>> import tempfile
    >>> from torchhook import diff, record
    >>> _ = torch.manual_seed(0)
    >>> folder, x = tempfile.mkdtemp(), torch.randn(4, 8)
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    >>> a = record(model, x, to=f"{folder}/a.th")
    >>> model[1].eps = 1e-2
    >>> with record(model, to=f"{folder}/b.th"):
    ...     _ = model(x)
    >>> diff(f"{folder}/a.th", f"{folder}/b.th").first
    Site(path='1', port='output')
    """
    require_module(model)
    if keep not in ("all", "sketch"):
        raise ValueError(f"keep must be 'all' or 'sketch', not {keep!r}")
    if steps is not None:
        require_count(steps, "steps")
    recorder = Recorder(model, Path(to), sites, grads or loss is not None, optimizer, keep, steps)
    if x is None:
        if loss is not None:
            raise ValueError("loss= needs x; in a with block, pass grads=True and call backward yourself")
        return recorder
    if grads or optimizer is not None or steps is not None:
        raise ValueError("grads=, optimizer= and steps= are for a with block; with x, pass loss= for gradients")
    return _recorded(recorder, x, loss, keep == "all" if noise is None else noise)


def _recorded(recorder: Recorder, x: Any, loss: Callable[..., Tensor] | None, noise: bool) -> Recording:
    """Run the model once under a recorder."""
    batch, graded = task_of(x, loss)
    model = recorder.model
    given = fitted(batch.arguments, model)
    recorder.raises = True
    with unchanged(model), torch.set_grad_enabled(graded is not None), recorder:
        output = model(*given.args, **given.kwargs)
        if graded is not None:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            kept = [parameter.grad for parameter in parameters]
            try:
                for parameter in parameters:
                    parameter.grad = None
                graded(output, on_device(batch.target, model)).backward()
            finally:
                for parameter, grad in zip(parameters, kept, strict=True):
                    parameter.grad = grad
    if noise:
        write_noise(recorder.folder, moved_by_rounding(model, RecordedRank(recorder.folder), batch))
    return recorder.recording


class Recorder(Attaching):
    """Writes what flows through a model, between `open` and `close`; see `torchhook.record`."""

    def __init__(
        self,
        model: nn.Module,
        to: Path,
        sites: Any = None,
        grads: bool = False,
        optimizer: Any = None,
        keep: Keep = "all",
        steps: int | None = None,
        counts: bool = False,
    ) -> None:
        self.model = model
        self.path = to
        self.raises = False  # whether a fault of ours reaches the caller of the model
        self._sites = sites
        self._grads = grads
        self._optimizer = optimizer
        self._keep: Keep = keep
        self._most = math.inf if steps is None else steps
        self._counts = counts or optimizer is not None  # whether steps are counted, or else passes
        self._writer: RecordingWriter | None = None
        self._attached = ExitStack()
        self._step = self._turn = 0
        self._turns: dict[int, tuple[int, int]] = {}  # from the number of a pass: its step, and which pass of that
        self._has_parameters = False  # whether those of this step were written
        self._failure = ""
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        """Where this process writes: with several ranks, below the folder that they share."""
        return self.path / f"{RANK}{rank()}" if world_size() > 1 else self.path

    @property
    def recording(self) -> Recording:
        """What was recorded so far."""
        return Recording(self.path)

    def open(self) -> Recorder:
        """Start recording. (``with`` does this.)"""
        if self._writer is not None:
            raise ValueError("a recorder is used once; make another one")
        where = self._where()
        taps = [Tap(where, self._see, port, self._wants) for port in self._ports()]
        if self._grads:
            taps = [Tap(where, CopiedOutputs()), *taps]
            if any(parameter.requires_grad for parameter in self.model.parameters()):
                taps.append(Tap("", self._see, "param_grad", self._wants))
        if self.raises:
            session = Session(self.model, taps, on_silent="ignore").open()
        else:  # the model may run in another thread, as that of a server
            session = Session(self.model, taps, scope="all", on_silent="ignore", on_fault=self._fail).open()
        try:
            self._writer = RecordingWriter(self.folder, self._about())
        except BaseException:
            session.abandon()
            raise
        self._attached.callback(self._finish)  # after everything else
        self._attached.callback(session.abandon)
        if self._optimizer is not None:
            for handle in on_step(self._optimizer, _nothing, lambda *_: self.count_step()):
                self._attached.callback(handle.remove)
        return self

    def close(self) -> None:
        """Stop recording, and write what is left. (The end of the ``with`` block does this.)"""
        self._attached.close()

    def _ports(self) -> tuple[Port, ...]:
        return ("input", "output", "grad_output") if self._grads else ("input", "output")

    def _where(self) -> Selector:
        if self._sites is None:
            return everywhere(self.model)
        return Selector.union(["", self._sites])

    def _about(self) -> About:
        return About(
            version=VERSION,
            model=type(unwrapped(self.model)).__name__,
            keep=self._keep,
            coarsest=precision(self.model.parameters()),
            modules={path: facts_of(module) for path, module in walk(self.model)},
            environment=_environment(self.model),
            rank=rank(),
            world_size=world_size(),
        )

    def _see(self, event: Event) -> None:
        """Write one value."""
        with self._lock:
            self._write(event)

    def _write(self, event: Event) -> None:
        if self._failure or (event.recomputed and event.port in ("input", "output")):
            return
        step, turn = self._turn_of(event.pass_number)
        value, live = event.value, event.live
        if event.args and event.kwargs:
            value, live = (value, snapshot(event.kwargs)), (live, event.kwargs)
        found = list(leaves(value))
        own = [tensor for _, tensor in leaves(live)]
        is_input = event.port == "input" and not event.path
        line = Line(
            step,
            turn,
            event.port,
            event.path,
            event.call,
            event.leaf_number if event.port == "grad_output" else 0,
            addresses=tuple(json.dumps(address, default=str) for address, _ in found),
            requires_grad=tuple(tensor.requires_grad for tensor in own),
            tree=to_json(Arguments(event.args, event.kwargs)) if is_input else None,
        )
        assert self._writer is not None
        self._writer.add(line, [tensor for _, tensor in found], own, whole=is_input)

    def _wants(self, number: int) -> bool:
        """Whether a pass is recorded."""
        return self._step < self._most or number in self._turns

    def _turn_of(self, number: int) -> tuple[int, int]:
        """The step and turn of a pass; the first event writes what came before, that of a step the parameters."""
        if number not in self._turns:
            assert self._writer is not None
            self._writer.flush()  # if the process is killed, the passes that have ended are there
            if not self._has_parameters:
                self._write_parameters()
            self._turns[number] = self._step, self._turn
            if self._counts:
                self._turn += 1
            else:
                self._step += 1
        return self._turns[number]

    def _write_parameters(self) -> None:
        """Write the parameters and buffers, as they are now; of sharded ones, this rank's part."""
        self._has_parameters = True
        shards = shards_of_gathered(self.model)
        assert self._writer is not None
        for name, tensor in parameters_of(self.model).items():
            own = shards.get(id(tensor), tensor)
            line = Line(self._step, 0, "param", name)
            self._writer.add(line, [snapshot(own)], [local(own.detach())], shards=placements(own))

    def count_step(self) -> None:
        """The optimizer has stepped: the parameters are those of the next step."""
        if self._failure or self._step >= self._most:
            return
        self._step, self._turn = self._step + 1, 0
        try:
            self._write_parameters()
            assert self._writer is not None
            self._writer.flush()
        except Exception as error:
            self._fail(error)

    def _finish(self) -> None:
        assert self._writer is not None
        try:
            self._writer.close()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Recording has failed, but the program of the user goes on."""
        if self.raises:
            raise error
        if not self._failure:
            self._failure = f"{type(error).__name__}: {error}"
            warn(f"recording to {str(self.path)!r} stopped at step {self._step}: {self._failure}")


def _nothing(*_: Any) -> None:
    pass


def _environment(model: nn.Module) -> dict[str, str]:
    """Facts about this process that may explain a difference."""
    first = next(model.parameters(), None)
    device = None if first is None else first.device
    name = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else platform.machine()
    return {
        "torchhook": str(sys.modules["torchhook"].__version__),  # imported by now, since this is part of it
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": f"{device} ({name})",
        "threads": str(torch.get_num_threads()),
        "tf32": str(torch.backends.cuda.matmul.allow_tf32),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
