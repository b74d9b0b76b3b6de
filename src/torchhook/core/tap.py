"""A tap says where, what and when: selector + port + schedule + transform + the action to take.

An action is a `Sink`, an `Edit`, or a plain callable that observes `Event`s. Before a session attaches, every
(tap, site) is bound once into an `Act`, a function with nothing left to look up; hooks call acts.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from torch import Tensor, nn

from torchhook.core.edit import Edit, Editing, GradientEditing
from torchhook.core.errors import TapError
from torchhook.core.event import Event, recomputing
from torchhook.core.passes import Pass, Scope
from torchhook.core.selection import Query, Selector
from torchhook.core.site import PORTS, Port, Site
from torchhook.core.snapshot import frozen, snapshot
from torchhook.core.trees import Address, Arguments

Schedule = Callable[[int], bool]
"""Which passes: a predicate on their number."""

Receive = Callable[[int, Address, Tensor], "Tensor | None"]
"""Takes the gradient of one leaf: its number among the leaves, its address, the gradient.

Returns None, or the gradient that continues."""

Act = Callable[[Pass, int, Any, "tuple[Any, ...]"], Any]
"""(pass, call, value, positional arguments) → None, or the value that continues.

For the gradient ports it is called in the forward, with the value whose gradient is wanted, and
returns the `Receive` for that call, or None if it is not wanted this time."""

_A = TypeVar("_A", bound=Callable[..., Any])


def at_once(act: _A) -> _A:
    """Say of `act` that it keeps nothing of the values it is given: what it is given need be no copy."""
    act.at_once = True  # type: ignore[attr-defined]  # functions take attributes
    return act


def is_at_once(act: Act) -> bool:
    """Whether that was said of it."""
    return getattr(act, "at_once", False)


class Unknown(tuple[Any, ...]):
    """The positional arguments of a call inside a compiled graph, which hands out none."""

    __slots__ = ()


class Keep:
    """The act of keeping a snapshot on the page of its pass, and nothing more.

    It is what most taps do. Where it is the only act, on the first page, and the `newest` pass is all
    that is kept, the hook does it itself.
    """

    __slots__ = ("newest", "page", "site")

    def __init__(self, page: int, site: int, newest: bool) -> None:
        self.page = page
        self.site = site
        self.newest = newest and page == 0

    def __call__(self, pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        pass_.pages[self.page].append((self.site, call, snapshot(value)))


class Sink(ABC):
    """Receives what taps see and returns nothing: to observe is all it can do.

    A sink of your own needs `receive` alone:

    >>> class Shapes(Sink):
    ...     def receive(self, event):
    ...         print(event.path, tuple(event.value.shape))
    """

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Take one event."""

    def bind(self, tap: Tap, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act for one site. Sinks in a hurry override it, to do without events."""
        return observing(self.receive, tap, site, module)


class Observer(Sink):
    """A plain callable, which is told of every event and must not answer."""

    def __init__(self, observe: Callable[[Event], Any]) -> None:
        self.observe = observe

    def receive(self, event: Event) -> None:
        """Tell the callable."""
        returned = self.observe(event)
        if returned is not None:
            raise TapError(
                f"the callable tapped to the {event.site} returned a {type(returned).__name__}; a plain callable"
                " observes and returns None (to change what flows, use an edit)"
            )


@dataclass(frozen=True, eq=False)
class Tap:
    """What to do with the values at some places of a model.

    `action` is a `Sink`, an `Edit`, or a callable that is given each `Event` and returns None.

    >>> import torch
    >>> from torchhook import Session
    >>> seen = []
    >>> with Session(nn.Sequential(nn.ReLU()), [Tap(nn.ReLU, lambda event: seen.append(event.value))]) as session:
    ...     _ = session.model(torch.tensor([-1.0, 2.0]))
    >>> seen
    [tensor([0., 2.])]
    """

    selector: Query
    action: Sink | Edit | Callable[[Event], None]
    port: Port = "output"
    when: Schedule | None = None
    transform: Callable[[Any], Any] | None = None
    group: str | None = None
    edits: bool = field(init=False, repr=False, default=False)  # whether it changes what flows

    def __post_init__(self) -> None:
        object.__setattr__(self, "selector", Selector.of(self.selector))
        object.__setattr__(self, "edits", isinstance(self.action, Edit))
        if not (isinstance(self.action, (Sink, Edit)) or callable(self.action)):
            raise TypeError(f"action must be a Sink, an Edit or a callable on events, not {self.action!r}")
        if isinstance(self.action, type):
            raise TypeError(f"action must be an object: make one, {self.action.__name__}(...)")
        if self.port not in PORTS:
            raise ValueError(f"port must be one of {', '.join(PORTS)}, not {self.port!r}")
        for name in ("when", "transform"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} must be callable or None, not {getattr(self, name)!r}")
        if self.group is not None and not isinstance(self.group, str):
            raise TypeError(f"group must be a name or None, not {self.group!r}")
        if self.edits and self.transform is not None:
            raise ValueError("transform changes what is recorded, and an edit records nothing: put it into the edit")
        if self.edits and self.port == "param":
            raise ValueError("an edit changes what flows; to change parameters, assign them")

    def bind(self, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act of this tap at one site."""
        if self.edits:
            assert isinstance(self.action, Edit)
            editing = Editing(self.action, site, module)
            act: Act = GradientEditing(editing) if site.port in ("grad_input", "grad_output") else editing
        else:
            act = self.sink.bind(self, site, module, scope)
        return act if self.when is None else _scheduled(act, self.when)

    @cached_property
    def sink(self) -> Sink:
        """The action as a sink, which a plain callable becomes."""
        assert not isinstance(self.action, Edit)
        return self.action if isinstance(self.action, Sink) else Observer(self.action)

    def transformed(self, value: Any, site: Site) -> Any:
        """`value` as the user wants it; an error in the transform names itself and the site."""
        if self.transform is None:
            return value
        try:
            return self.transform(value)
        except Exception as error:
            raise TapError(
                f"transform raised {type(error).__name__} on the {site}: {error}; it is called with what is"
                " recorded there (try it on a captured value first)"
            ) from error


def every(n: int) -> Schedule:
    """Passes 0, `n`, 2 `n`, …

    >>> [number for number in range(7) if every(3)(number)]
    [0, 3, 6]
    """
    require_count(n, "n")
    return lambda number: number % n == 0


def first(n: int) -> Schedule:
    """The first `n` passes.

    >>> [number for number in range(7) if first(2)(number)]
    [0, 1]
    """
    require_count(n, "n")
    return lambda number: number < n


def sample(fraction: float, seed: int = 0) -> Schedule:
    """A random `fraction` of the passes, the same ones for the same `seed`.

    >>> sum(map(sample(0.25), range(1000)))
    240
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise ValueError(f"fraction must lie in (0, 1], not {fraction!r}")
    return lambda number: random.Random(f"{seed}:{number}").random() < fraction


def require_count(value: Any, argument: str) -> None:
    """Raise unless `value` is a positive whole number (True is not one)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{argument} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{argument} must be at least 1, not {value}")


def observing(receive: Callable[[Event], None], tap: Tap, site: Site, module: nn.Module) -> Act:
    """The act that tells `receive` of every value at the site as an `Event`."""

    def observe(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        kwargs = {}
        if isinstance(value, Arguments):
            value, kwargs = value.unwrapped(), value.kwargs
        kept = tap.transformed(snapshot(value), site)
        receive(Event(site, kept, value, module, call, pass_.number, (), args, kwargs, recomputing()))

    def observe_gradient(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Receive:
        number = pass_.number

        def receive_gradient(_: int, leaf: Address, gradient: Tensor) -> None:
            kept = tap.transformed(frozen(gradient), site)
            receive(Event(site, kept, gradient, module, call, number, leaf))

        return receive_gradient

    return observe_gradient if site.port in ("grad_input", "grad_output") else observe


def _scheduled(act: Act, when: Schedule) -> Act:
    def on_schedule(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Any:
        # what comes before the first pass counts with it
        return act(pass_, call, value, args) if when(max(pass_.number, 0)) else None

    return at_once(on_schedule) if is_at_once(act) else on_schedule
