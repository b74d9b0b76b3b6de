"""Sinks receive what taps see. They return nothing, so all they can do is observe."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torchhook.core.errors import TapError
from torchhook.core.event import Event, copied, recomputing
from torchhook.core.page import Keeper
from torchhook.core.passes import Pass
from torchhook.core.scope import Scope
from torchhook.core.shown import Shown
from torchhook.core.site import GRADIENT_PORTS, Port, Site
from torchhook.core.trees import Address, Arguments, mapped

if TYPE_CHECKING:
    from torchhook.core.tap import Tap

Receive = Callable[[int, Address, Tensor], "Tensor | None"]
"""Takes the gradient of one leaf: its number among the leaves, its address, the gradient.

Returns None, or the gradient to continue with."""

Act = Callable[[Pass, int, Any, "tuple[Any, ...]"], Any]
"""(pass, call, value, positional arguments) → None, or the value to continue with.

For the gradient ports it is called in the forward, with the value whose gradient is wanted, and returns the `Receive`
for that call, or None if the gradient is not wanted this time."""

Bind = Callable[[Site, nn.Module], Act]
"""Makes the act of a tap at one site, which belongs to a module."""


class Unknown(tuple[Any, ...]):
    """Stands for the positional arguments of a call inside a compiled graph, which does not hand them out."""

    __slots__ = ()


UNKNOWN = Unknown()


class Sink(Shown, ABC):
    """Receives what taps see. A sink of your own only needs `receive`:

    >>> class Shapes(Sink):
    ...     def receive(self, event):
    ...         print(event.path, tuple(event.value.shape))

    A sink may be `lazy`: then `event.value` is copied only if `receive` reads it, and neither the event nor
    `event.live` may be kept. It may have a `keeper`, which begins a page with every pass: ``event.page``.
    """

    lazy = False
    ports: tuple[Port, ...] = ()  # if it needs others than that of its tap

    @property
    def keeper(self) -> Keeper | None:
        """Begins a page with every pass, if this sink needs one."""
        return None

    @abstractmethod
    def receive(self, event: Event) -> None:
        """Take one event."""

    def expect(self, event: Event) -> Any:
        """Called in the forward: return None if the gradient of ``event.live`` is not wanted.

        Anything else comes back as ``event.expected`` with each of the gradients. (For the port ``grad_input``,
        ``event.live`` holds all arguments of the call.)
        """
        return True

    def shortcut(self, tap: Tap, port: Port, scope: Scope) -> Bind | None:
        """Makes acts that do the same without events. Only recording has them: it is as cheap as making the event."""
        return None


class Observer(Sink):
    """Calls a plain function with every event; it must return None."""

    def __init__(self, observe: Callable[[Event], Any]) -> None:
        self.observe = observe

    def receive(self, event: Event) -> None:
        """Call the function."""
        require_none(self.observe(event), event)


def require_none(returned: Any, event: Event) -> None:
    """Raise if the function that observed `event` returned something."""
    if returned is not None:
        raise TapError(
            f"the function tapped to the {event.site} returned a {type(returned).__name__}; a plain function"
            " observes and must return None (to change the value, use an Edit, such as torchhook.edits.apply(function))"
        )


def observing(sink: Sink, tap: Tap, port: Port, scope: Scope) -> Bind:
    """Makes the acts that hand every value at a site with this `port` to `sink`."""
    return sink.shortcut(tap, port, scope) or partial(_observing, sink, tap, scope)


def _observing(sink: Sink, tap: Tap, scope: Scope, site: Site, module: nn.Module) -> Act:
    """The act that hands every value at the site to `sink` as an `Event`."""
    keeper = sink.keeper
    position = None if keeper is None else scope.page_position(keeper)
    transform = None if tap.transform is None else tap.transformed
    is_lazy, receive = sink.lazy, sink.receive

    def observe(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
        in_graph = args is UNKNOWN
        if in_graph and not is_lazy:  # the graph reuses this memory
            value, in_graph = mapped(copied, value), False
        kwargs = None
        if isinstance(value, Arguments):
            args, kwargs, value = value.args, value.kwargs, value.unwrapped()
        event = Event(
            site,
            value,
            module,
            call,
            pass_.number,
            None if position is None else pass_.pages[position],
            args=args,
            kwargs=kwargs,
            recomputed=recomputing(),
            in_graph=in_graph,
            transform=transform,
        )
        if not is_lazy:
            event.value  # noqa: B018 (copied now, since it may be read later)
        receive(event)

    def observe_gradient(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Receive | None:
        number, in_graph = pass_.number, args is UNKNOWN
        page = None if position is None else pass_.pages[position]
        expected = sink.expect(
            Event(site, value, module, call, number, page, args=args, in_graph=in_graph, transform=transform)
        )
        if expected is None:
            return None

        def receive_gradient(leaf_number: int, leaf: Address, gradient: Tensor) -> None:
            if in_graph and not is_lazy:
                gradient = copied(gradient)
            event = Event(  # without the page: an autograd graph that outlives the session must not keep it
                site,
                gradient,
                module,
                call,
                number,
                leaf=leaf,
                leaf_number=leaf_number,
                in_graph=in_graph and is_lazy,
                expected=expected,
                transform=transform,
            )
            if not is_lazy:
                event.value  # noqa: B018 (as above)
            receive(event)

        return receive_gradient

    return observe_gradient if site.port in GRADIENT_PORTS else observe
