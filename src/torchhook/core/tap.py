"""A tap says where, what and when: selector, port, schedule, transform, and the action to take.

An action is a `Sink`, an `Edit`, or a plain callable that observes. When a session attaches, each (tap, site)
is bound into an `Act`, a function with nothing left to look up; hooks call acts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from torch import nn

from torchhook.core.edit import Edit, Editing, GradientEditing
from torchhook.core.errors import TapError
from torchhook.core.event import Event
from torchhook.core.passes import Pass
from torchhook.core.scope import Scope
from torchhook.core.selection import Query, Selector
from torchhook.core.shown import Shown, maker
from torchhook.core.sink import Act, Bind, Sink, observing
from torchhook.core.site import GRADIENT_PORTS, PORTS, Port, Site
from torchhook.core.torch_style import observer

Schedule = Callable[[int], bool]
"""Which passes: a predicate on their numbers."""


@dataclass(frozen=True, eq=False, repr=False)
class Tap(Shown):
    """What to do with the values at some places of a model.

    `action` is a `Sink`, an `Edit`, or a callable that observes and returns None. One that needs a single argument is
    called with each `Event`; one that needs more is called as torch calls hooks: ``hook(module, inputs, output)``, for
    the port ``input`` ``hook(module, inputs)`` (or ``hook(module, args, kwargs)``), for ``grad_output``
    ``hook(module, grad_output)``, and for ``grad_input`` ``hook(module, grad_input, grad_output)``. Its values are
    safe to keep. The gradients of several tensors come one at a time, with None for the others.

    >>> import torch
    >>> from torchhook import Session
    >>> seen = []
    >>> with Session(nn.Sequential(nn.ReLU()), [Tap(nn.ReLU, lambda event: seen.append(event.value))]) as session:
    ...     _ = session.model(torch.tensor([-1.0, 2.0]))
    >>> seen
    [tensor([0., 2.])]
    """

    selector: Query
    action: Sink | Edit | Callable[[Event], None] | Callable[..., None]
    port: Port = "output"
    when: Schedule | None = None
    transform: Callable[[Any], Any] | None = None
    group: str | None = None
    edits: bool = field(init=False, default=False)  # whether it changes what flows
    ports: tuple[Port, ...] = field(init=False, default=())  # that of the tap, unless its action needs others

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", Selector.of(self.selector))
        object.__setattr__(self, "edits", isinstance(self.action, Edit))
        if not (isinstance(self.action, (Sink, Edit)) or callable(self.action)):
            raise TypeError(f"action must be a Sink, an Edit or a callable on events, not {self.action!r}")
        if isinstance(self.action, type):
            raise TypeError(f"action must be an object, not a class: write {self.action.__name__}(...)")
        if self.port not in PORTS:
            raise ValueError(f"port must be one of {', '.join(PORTS)}, not {self.port!r}")
        for name in ("when", "transform"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} must be callable or None, not {getattr(self, name)!r}")
        if self.group is not None and not isinstance(self.group, str):
            raise TypeError(f"group must be a name or None, not {self.group!r}")
        if self.edits and self.transform is not None:
            raise ValueError("transform= changes what is recorded, but an edit records nothing; leave transform= out")
        if self.edits and self.port == "param":
            raise ValueError("an edit changes activations and gradients, not parameters; assign to the parameter")
        ports = () if self.edits else self.sink.ports  # raises if the action takes other arguments
        object.__setattr__(self, "ports", ports or (self.port,))

    def binding(self, port: Port, scope: Scope) -> Bind:
        """Makes the acts of this tap at sites with this `port`. A model has many sites: what they share is in here."""
        action, when = self.action, self.when
        bind: Bind = partial(_editing, action) if isinstance(action, Edit) else observing(self.sink, self, port, scope)
        return bind if when is None else lambda site, module: _scheduled(bind(site, module), when)

    @cached_property
    def sink(self) -> Sink:
        """The action as a sink."""
        assert not isinstance(self.action, Edit)
        return self.action if isinstance(self.action, Sink) else observer(self.action, self.port)

    def transformed(self, value: Any, site: Site) -> Any:
        """`value` after the user's transform; an error in the transform names the site."""
        if self.transform is None:
            return value
        try:
            return self.transform(value)
        except Exception as error:
            raise TapError(
                f"transform raised {type(error).__name__} on the {site}: {error}; it is called with the recorded value,"
                " so try it on a captured value first"
            ) from error


class Passes(Shown):
    """A schedule: which passes, by their numbers."""

    def __init__(self, test: Schedule) -> None:
        self.test = test

    def __call__(self, number: int) -> bool:
        return self.test(number)


@maker
def every(n: int) -> Schedule:
    """Passes 0, `n`, 2 `n`, …

    >>> [number for number in range(7) if every(3)(number)]
    [0, 3, 6]
    """
    require_count(n, "n")
    return Passes(lambda number: number % n == 0)


@maker
def first(n: int) -> Schedule:
    """The first `n` passes.

    >>> [number for number in range(7) if first(2)(number)]
    [0, 1]
    """
    require_count(n, "n")
    return Passes(lambda number: number < n)


@maker
def sample(fraction: float, seed: int = 0) -> Schedule:
    """A random `fraction` of the passes, the same ones for the same `seed`.

    >>> sum(map(sample(0.25), range(1000)))
    240
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must be in (0, 1], not {fraction!r}")
    return Passes(lambda number: random.Random(f"{seed}:{number}").random() < fraction)


def require_count(value: Any, argument: str) -> None:
    """Raise unless `value` is a positive whole number (True is not one)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, not {value}")


def _editing(edit: Edit, site: Site, module: nn.Module) -> Act:
    editing = Editing.at(edit, site, module)
    return GradientEditing(editing) if site.port in GRADIENT_PORTS else editing


def _scheduled(act: Act, when: Schedule) -> Act:
    def on_schedule(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        # what comes before the first pass belongs to it
        return act(pass_, call, value, args) if when(max(pass_.number, 0)) else None

    return on_schedule
