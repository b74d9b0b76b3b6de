"""Watches one pass of a model at a time for NaN and Inf.

It keeps the arguments of each call, copied on write, the marks of its output, and in the backward the gradients of its
output. The marks are read at the end of the forward; the gradients that the optimizer will use, at the end of the
backward. If they are not finite, the search for the origin begins. Everything is dropped when the next pass begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torchhook.core.errors import NonfiniteError
from torchhook.core.event import Event, copied
from torchhook.core.findings import Finding
from torchhook.core.instances import instances
from torchhook.core.selection import Selector, walk
from torchhook.core.session import Session
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.snapshot import frozen, snapshot
from torchhook.core.tap import Tap
from torchhook.core.text import warn
from torchhook.core.torch_internals import after_backward, scale_of
from torchhook.core.trees import Address, Arguments, leaves, mapped
from torchhook.rules.origin.calls import (
    BAD,
    Call,
    Setting,
    are_finite,
    bits_in,
    generators,
    marks,
    merged,
    read,
    used_buffers,
)
from torchhook.rules.origin.files import save_call
from torchhook.rules.origin.origin import Origin
from torchhook.rules.origin.search import Arrival, Hit, in_backward, in_forward, in_unfinished

OnFound = Literal["raise", "warn", "record"]

_MOST = 100_000  # calls to keep: a forward that raised outside of any pass never ends


class NonfiniteSink(Sink):
    """Receives the calls and gradients of a model, and finds the origin of the first NaN or Inf.

    It is separate from `Catch`, which the hooks must not keep alive.
    """

    lazy = True

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
        self._generators: dict[str, torch.Generator] = {}
        self._open: list[Call] = []
        self._calls: dict[tuple[str, int, int], Call] = {}  # calls that have ended, in that order
        self._arrived: list[Arrival] = []  # gradients that were not checked yet
        self._checked: list[Arrival] = []  # gradients of outputs that were
        self._masking: set[str] = set()
        self._clock = count(1)

    def taps(self) -> list[Tap]:
        """The taps that it needs: on every call, and on all gradients."""
        parts = any(path and _is_called(path, module) for path, module in walk(self.model))
        where = Selector.union(("", _is_called) if parts else ("",))
        everywhere = [Tap(where, self, "input"), Tap(where, self, "output"), Tap(where, self, "grad_output")]
        # At the port grad_input, a tensor that is passed twice becomes two: only the model itself is tapped there.
        return [*everywhere, Tap("", self, "grad_input"), Tap("", self, "param_grad")]

    def expect(self, event: Event) -> Any:
        """Want the gradients of a call, as long as nothing was found."""
        if self.over:
            return None
        place = event.path, event.call, event.pass_number
        known = next((call for call in self._open[-1:] if call.place == place), self._calls.get(place))
        return _no_call if known is None else weakref.ref(known)  # a graph that lives on must not keep it

    def receive(self, event: Event) -> None:
        """Look at one call as it begins or ends, or at one gradient."""
        place = event.path, event.call, event.pass_number
        if event.port == "input":
            value = Arguments(event.args, event.kwargs)
            self._safely(self._begin, place, event.module, value, event.in_graph)
        elif event.port == "output":
            self._safely(self._end, place, event.live)
        else:
            call = None if event.expected is None else event.expected()
            self._safely(self._arrive, event.site, place, call, event.leaf, event.live, event.in_graph)

    def start(self, session: Session) -> None:
        """Begin to watch, with the parameters of `session`."""
        self._parameters = session.parameters(Selector.of(""))
        self._generators = generators({tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())})

    def stop(self) -> None:
        """Stop watching."""
        self.over = True
        self._forget()

    def explain(self, error: Exception) -> None:
        """Add a note to an error of the user's if the forward that raised it had produced NaN or Inf."""
        self._safely(self._explain, error)

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

    def _safely(self, look: Callable[..., None], *what: Any) -> None:
        """Run `look`. An error of our own must not stop a training: it only ends the watching."""
        if self.over:
            return
        try:
            look(*what)
        except NonfiniteError:
            raise
        except Exception as error:
            self.stop()
            warn(f"no longer watching for NaN and Inf: {type(error).__name__}: {error}")

    def _begin(self, place: tuple[str, int, int], module: nn.Module, value: Arguments, in_graph: bool) -> None:
        self.seen = True
        is_stale = bool(self._open) and self._open[0].pass_number != place[2]  # its forward raised
        if is_stale or not self._open or len(self._calls) > _MOST:
            self._forget()
        parent = self._open[-1] if self._open else None
        setting, begun = Setting.now(self._generators), next(self._clock)
        wanted = [tensor.requires_grad for _, tensor in leaves(value)]
        buffers = {name: frozen(buffer) for name, buffer in used_buffers(module).items()}
        kept = mapped(copied, value) if in_graph else snapshot(value)
        self._open.append(Call(*place, module, parent, setting, begun, kept, wanted, buffers, in_graph))

    def _end(self, place: tuple[str, int, int], value: Any) -> None:
        while self._open:
            call = self._open.pop()  # inner calls that raised never ended
            if call.place == place:
                break
        else:
            return
        call.marks, call.ended = marks(value), next(self._clock)
        self._calls[place] = call
        if not self._open:
            self._conclude(call)

    def _conclude(self, top: Call) -> None:
        """At the end of the forward: check the output of `top`, and the other calls only if it is not finite."""
        if not merged(read(top.marks)):
            return
        calls = list(self._calls.values())
        self._read(calls)
        hit = in_forward(calls, top, self._masking)
        if hit is not None:
            self._report(hit)

    def _arrive(
        self,
        site: Site,
        place: tuple[str, int, int],
        call: Call | None,
        address: Address,
        gradient: Tensor,
        in_graph: bool,
    ) -> None:
        # The gradient of a parameter is checked before anything writes to it, and must not be copied.
        kept = gradient.detach() if site.port == "param_grad" else (copied if in_graph else frozen)(gradient)
        self._arrived.append(Arrival(site.port, *place, call, kept))
        if call is not None and site.port == "grad_output":
            call.grads[address] = kept
        if len(self._arrived) == 1:
            after_backward(lambda: self._safely(self._conclude_backward))

    def _conclude_backward(self) -> None:
        """At the end of the backward, while the parameters are unchanged: check the gradients that leave the model."""
        arrived, self._arrived = self._arrived, []
        earlier = list(self._checked)  # FSDP delivers the gradients of parameters after the backward
        self._checked += [arrival for arrival in arrived if arrival.port == "grad_output"]
        if are_finite([arrival.gradient for arrival in arrived if arrival.leaves_model]):
            return
        broken = [(known, bits) for known in earlier + arrived if (bits := bits_in(known.gradient))]
        if broken and not _is_scaled():
            self._report(in_backward(broken, list(self._calls.values()), self._parameters))

    def _read(self, calls: list[Call]) -> None:
        bits = iter(read([mark for call in calls for mark in call.marks]))
        for call in calls:
            call.bits = merged(next(bits) for _ in call.marks)

    def _report(self, hit: Hit) -> None:
        self._note(hit)
        text = self._message()
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

    def _message(self) -> str:
        finding, origin = self.finding, self.origin
        assert finding is not None and origin is not None
        lines = [origin.message(), *finding.message.split("\n")[1:]]  # about the saved file
        lines += [f"  passed on by {len(finding.affected)} later calls"] if finding.affected else []
        lines += [finding.hint] if finding.hint else []
        return "\n".join(lines)

    def _forget(self) -> None:
        for kept in (self._open, self._calls, self._arrived, self._checked):
            kept.clear()


def _no_call() -> None:
    return None


def _is_called(path: str, module: nn.Module) -> bool:
    """Whether hooks on `module` fire. Attention uses the weights of its last layer without calling it."""
    return not isinstance(module, (torch.jit.ScriptModule, NonDynamicallyQuantizableLinear))


def _is_scaled() -> bool:
    """Whether a GradScaler is in use, which lets gradients overflow while it searches for its scale."""
    scalers = [scaler for scaler in instances(GradScaler) if scaler.is_enabled()]
    return any((scale := scale_of(scaler)) is not None and scale.item() >= 1 for scaler in scalers)
