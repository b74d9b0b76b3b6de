"""Watching a model for NaN and Inf, a pass at a time.

Of each call is kept what it was given, copied on write, and how what it returned is marked. The marks are read at the
end of the forward, and those of gradients at the end of the backward; if what leaves the model there is not finite, it
is searched where that began. What is kept goes when the next pass begins.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.autograd import Variable
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torchhook.core.event import Event
from torchhook.core.selection import Selector, walk
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.tap import Tap
from torchhook.errors import NonfiniteError
from torchhook.findings import Finding
from torchhook.origins.calls import BAD, Call, Setting, marks, merged, read
from torchhook.origins.files import save_call
from torchhook.origins.origin import Origin
from torchhook.origins.search import Arrival, Hit, in_backward, in_forward, in_unfinished
from torchhook.text import warn

OnFound = Literal["raise", "warn", "record"]

_MOST = 100_000  # calls that are kept: a forward that raised outside of any pass never ends


class Watch:
    """What the hooks tell, and what was found. (Apart from `Catch`, which the hooks must not keep alive.)"""

    def __init__(self, model: nn.Module, save: Path | None, on_found: OnFound) -> None:
        self.model = model
        self.save = save
        self.on_found = on_found
        self.origin: Origin | None = None
        self.finding: Finding | None = None
        self.file: Path | None = None
        self.over = False
        self.seen = False  # whether anything ran
        self._parameters: dict[str, nn.Parameter] = {}
        self._open: list[Call] = []
        self._calls: dict[tuple[str, int, int], Call] = {}  # those that ended, in this order
        self._arrived: list[Arrival] = []  # gradients that were not read yet
        self._broken: list[tuple[Arrival, int]] = []  # those that were and are not finite
        self._masking: set[str] = set()
        self._clock = count(1)
        self._devices: tuple[str, ...] = ()

    def taps(self) -> list[Tap]:
        """What has to be seen: every call, and all gradients."""
        parts = any(path and _is_called(path, module) for path, module in walk(self.model))
        where = Selector.union(("", _is_called) if parts else ("",))
        arrive = self._safely(self._arrive)
        return [
            Tap(where, self._safely(self._begin), "input"),
            Tap(where, self._safely(self._end), "output"),
            Tap(where, arrive, "grad_output"),
            Tap("", arrive, "grad_input"),  # a tensor given twice becomes two there, so not elsewhere
            Tap("", arrive, "param_grad"),
        ]

    def start(self, session: Session) -> None:
        """Watch from now on, as a session tells."""
        self._parameters = session.parameters(Selector.of(""))
        devices = {str(tensor.device) for tensor in (*self.model.parameters(), *self.model.buffers())}
        self._devices = tuple(sorted(devices - {"cpu", "meta"}))

    def stop(self) -> None:
        """Watch no more."""
        self.over = True
        self._forget()

    def explain(self, error: Exception) -> None:
        """Note on an error of the user's that the forward which raised it had made NaN or Inf, if it had."""
        self._safely(self._explain)(error)

    def _explain(self, error: Exception) -> None:
        calls = list(self._calls.values())
        if not self._open or not calls:
            return
        self._read(calls)
        hit = in_unfinished(calls) if calls[-1].bits & BAD else None
        if hit is not None:
            self._note(hit)
            if hasattr(error, "add_note"):
                error.add_note(f"(torchhook.catch_nonfinite: {hit.origin.message()})")

    def _safely(self, look: Callable[..., None]) -> Callable[..., None]:
        """To be watched must not stop a training: an error of our own ends the watching, and no more."""

        def safely(*event: Event | Exception) -> None:
            if self.over:
                return
            try:
                look(*event)
            except NonfiniteError:
                raise
            except Exception as error:
                self.stop()
                warn(f"NaN and Inf are no longer watched for, for that raised {type(error).__name__}: {error}")

        return safely

    def _begin(self, event: Event) -> None:
        self.seen = True
        is_stale = bool(self._open) and self._open[0].pass_number != event.pass_number  # that forward raised
        if is_stale or not self._open or len(self._calls) > _MOST:
            self._forget()
        parent = self._open[-1] if self._open else None
        self._open.append(Call.of(event, parent, Setting.now(self._devices), next(self._clock)))

    def _end(self, event: Event) -> None:
        place = event.path, event.call, event.pass_number
        while self._open:
            call = self._open.pop()  # calls inside that raised never ended
            if call.place == place:
                break
        else:
            return
        call.marks, call.ended = marks(event.live), next(self._clock)
        self._calls[place] = call
        if not self._open:
            self._conclude(call)

    def _conclude(self, top: Call) -> None:
        """The forward is over: read what `top` returned, and the rest only if that is broken."""
        if not merged(read(top.marks)):
            return
        calls = list(self._calls.values())
        self._read(calls)
        hit = in_forward(calls, top, self._masking)
        if hit is not None:
            self._tell(hit)

    def _arrive(self, event: Event) -> None:
        if not self._arrived:
            Variable._execution_engine.queue_callback(self._safely(self._conclude_backward))
        call = self._calls.get((event.path, event.call, event.pass_number))
        place = event.port, event.path, event.call, event.pass_number
        self._arrived.append(Arrival(*place, None if event.port == "param_grad" else call, marks(event.live)))
        if call is not None and event.port == "grad_output":
            call.grads[event.leaf] = event.value

    def _conclude_backward(self) -> None:
        """The backward is over, and the parameters are as they were in it."""
        arrived, self._arrived = self._arrived, []
        bits = iter(read([mark for arrival in arrived for mark in arrival.marks]))
        known = [(arrival, merged(next(bits) for _ in arrival.marks)) for arrival in arrived]
        broken = [(arrival, bits) for arrival, bits in known if bits]
        self._broken += broken  # FSDP fills in the gradients of parameters when all is over
        if any(arrival.leaves_model for arrival, _ in broken) and not _is_scaled():
            self._tell(in_backward(self._broken, list(self._calls.values()), self._parameters))

    def _read(self, calls: list[Call]) -> None:
        bits = iter(read([mark for call in calls for mark in call.marks]))
        for call in calls:
            call.bits = merged(next(bits) for _ in call.marks)

    def _tell(self, hit: Hit) -> None:
        self._note(hit)
        text = self._story()
        if self.on_found == "raise":
            raise NonfiniteError(text)
        if self.on_found == "warn":
            warn(text)

    def _note(self, hit: Hit) -> None:
        self.origin, self.finding = hit.origin, hit.origin.finding(hit.affected)
        if self.save is not None and hit.call is not None:
            calls = list(self._calls.values())
            self.file, self.finding = save_call(self.save, hit.call, calls, self.origin, self.finding)
        self.stop()

    def _story(self) -> str:
        finding = self.finding
        assert finding is not None
        lines = [finding.message]
        lines += [f"  passed on by {len(finding.affected)} later calls"] if finding.affected else []
        lines += [finding.hint] if finding.hint else []
        return "\n".join(lines)

    def _forget(self) -> None:
        for kept in (self._open, self._calls, self._arrived, self._broken):
            kept.clear()


class Catch:
    """A model that is watched for NaN and Inf; see `torchhook.catch_nonfinite`."""

    def __init__(self, model: nn.Module, save: Path | None, on_found: OnFound) -> None:
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise ValueError("DataParallel runs copies of the model in threads; watch its .module, on one device")
        self._watch = Watch(model, save, on_found)
        self._session = Session(model, self._watch.taps(), on_silent="ignore", detach_on_error=False)

    @property
    def origin(self) -> Origin | None:
        """Where the first NaN or Inf began, if there was one."""
        return self._watch.origin

    @property
    def finding(self) -> Finding | None:
        """The same with all that passed it on."""
        return self._watch.finding

    @property
    def file(self) -> Path | None:
        """Where the call was saved."""
        return self._watch.file

    def attach(self) -> Catch:
        """Begin to watch. (``with`` does this.)"""
        self._session.attach()
        self._watch.start(self._session)
        return self

    def detach(self) -> None:
        """Take the hooks away. (The end of the ``with`` block does this.)"""
        self._session.detach()
        if not self._watch.seen:
            warn(f"nothing was watched for NaN: {self._session.silent.get(Site(''), 'nothing ran')}")
        self._watch.stop()

    def __enter__(self) -> Catch:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.detach()
            return
        self._session.abandon()
        if isinstance(error, Exception):
            self._watch.explain(error)
        self._watch.stop()

    def __repr__(self) -> str:
        return f"Catch({type(self._watch.model).__name__}): {self.finding or 'nothing found'}"


def origin_of(model: nn.Module, run: Callable[[], object]) -> Finding | None:
    """Where the first NaN or Inf began while `run` ran `model`, and perhaps its backward; None if there was none.

    >>> from torchhook.origins import origin_of
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Softmax(1))
    >>> finding = origin_of(model, lambda: model(torch.full((1, 2), torch.inf)))
    >>> finding.code, finding.evidence["came_with"]
    ('TH101', 'the argument 0')
    """
    with Catch(model, None, "record") as caught:
        run()
    return caught.finding


def _is_called(path: str, module: nn.Module) -> bool:
    """Whether hooks on `module` tell anything. Attention uses the weights of its last layer without calling it."""
    return not isinstance(module, (torch.jit.ScriptModule, NonDynamicallyQuantizableLinear))


def _is_scaled() -> bool:
    """Whether a GradScaler is at work, which lets gradients overflow until it knows the scale."""
    scalers = [known for known in gc.get_objects() if issubclass(type(known), GradScaler)]
    return any(s.is_enabled() and s._scale is not None and s._scale.item() >= 1 for s in scalers)
