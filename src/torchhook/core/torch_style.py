"""Hooks that are called as torch calls them, told by how many arguments they need.

An observer that needs one argument gets an `Event`. One that needs more gets what torch would give a hook at that port.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from torch import Tensor

from torchhook.core.errors import TapError
from torchhook.core.event import Event
from torchhook.core.sink import Observer, Sink, Unknown, require_none
from torchhook.core.site import Port
from torchhook.core.snapshot import snapshot
from torchhook.core.trees import leaves

CALLED_WITH: dict[Port, dict[int, str]] = {
    "input": {2: "module, inputs", 3: "module, args, kwargs"},
    "output": {3: "module, inputs, output"},
    "grad_output": {2: "module, grad_output"},
    "grad_input": {3: "module, grad_input, grad_output"},
}
"""How torch calls hooks at each port, by the number of arguments. Those on parameters have one, so they get events."""

_MOST_BEGUN = 10_000  # calls under way; more have raised


def observer(action: Callable[..., Any], port: Port) -> Sink:
    """The sink that calls `action` in the way that it asks for; raises if there is none at `port`."""
    needed = _needed(action)
    if needed < 2:
        return Observer(action)
    ways = CALLED_WITH.get(port, {})
    if needed in ways:
        return TorchStyle(action, port, with_kwargs=ways[needed].endswith("kwargs"))
    elsewhere = [name for name, known in CALLED_WITH.items() if needed in known]
    raise TypeError(
        f"action {getattr(action, '__qualname__', type(action).__name__)} needs {needed} arguments, but at the port"
        f" {port!r} it is called as {' or '.join(f'hook({way})' for way in ('event', *ways.values()))}"
        + (f"; or pass port={' or '.join(map(repr, elsewhere))}" if elsewhere else "")
    )


class Gradients:
    """The gradients of one call that have arrived, None for the others."""

    def __init__(self) -> None:
        self.inputs: list[Tensor | None] = []
        self.outputs: list[Tensor | None] = []
        self.end_here = False  # whether no input needs one


class TorchStyle(Sink):
    """Calls a hook as torch would, with values that are safe to keep; it must return None.

    Gradients arrive one at a time: a hook on several tensors is called once for each gradient, with None for the
    others.
    """

    lazy = True

    def __init__(self, hook: Callable[..., Any], port: Port, with_kwargs: bool) -> None:
        self.hook = hook
        self.with_kwargs = with_kwargs
        self.ports: tuple[Port, ...] = ("grad_input", "grad_output") if port == "grad_input" else (port,)
        self._begun: dict[tuple[str, int, int], Gradients] = {}  # calls whose forward is under way

    def expect(self, event: Event) -> Gradients:
        """In the forward: what the gradients of this call are put into."""
        call = event.path, event.pass_number, event.call
        gradients = self._begun.pop(call, None) or Gradients()
        places: list[Tensor | None] = [None for _ in leaves(event.live)]
        if event.port == "grad_output":
            gradients.outputs = places
            return gradients
        gradients.inputs = places
        gradients.end_here = not any(tensor.requires_grad for _, tensor in leaves(event.live))
        self._begun[call] = gradients
        if len(self._begun) > _MOST_BEGUN:
            del self._begun[next(iter(self._begun))]
        return gradients

    def receive(self, event: Event) -> None:
        """Call the hook with one value or gradient."""
        if event.expected is not None:
            self._receive_gradient(event, event.expected)
        elif event.port == "input":
            inputs = snapshot(event.args) if event.transform is None else (event.value,)
            self._call(event, inputs, *([snapshot(event.kwargs)] if self.with_kwargs else []))
        elif isinstance(event.args, Unknown):
            raise TapError(
                f"a hook(module, inputs, output) at the {event.site} needs the module's inputs, which are not"
                " available in a compiled graph; take one argument instead, the event"
            )
        else:
            self._call(event, snapshot(event.args), event.value)

    def _receive_gradient(self, event: Event, gradients: Gradients) -> None:
        is_input = event.port == "grad_input"
        places = gradients.inputs if is_input else gradients.outputs
        alone = [event.value if number == event.leaf_number else None for number in range(len(places))]
        places[event.leaf_number] = event.value
        if is_input:
            self._call(event, tuple(alone), tuple(gradients.outputs))
        elif self.ports == ("grad_output",):
            self._call(event, tuple(alone))
        elif gradients.end_here:
            self._call(event, tuple(gradients.inputs), tuple(alone))

    def _call(self, event: Event, *values: Any) -> None:
        require_none(self.hook(event.module, *values), event)


def _needed(action: Callable[..., Any]) -> int:
    """How many positional arguments `action` cannot do without; 1 if it does not tell."""
    try:
        parameters = inspect.signature(action).parameters.values()
    except (TypeError, ValueError):  # some builtins
        return 1
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(known.kind in positional and known.default is Parameter.empty for known in parameters)
