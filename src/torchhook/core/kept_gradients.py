"""The gradients of a recorded value, and the act that keeps them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from torchhook.core.container_text import rebuilt
from torchhook.core.event import copied
from torchhook.core.passes import Pass
from torchhook.core.sink import UNKNOWN, Receive
from torchhook.core.snapshot import Held, frozen, peek, read
from torchhook.core.trees import Address, mapped


class KeptGradients(Held):
    """The gradients of one recorded value, filled in leaf by leaf; None where no gradient came."""

    __slots__ = ("__weakref__", "finish", "found", "shape")

    def __init__(self, shape: Any, count: int, finish: Callable[[Any], Any] | None = None) -> None:
        self.shape = shape  # the value, with a `Place` for each of its tensors
        self.found: list[Any] = [None] * count
        self.finish = finish  # a transform of the whole value, which is complete only when it is read

    @staticmethod
    def of(value: Any, finish: Callable[[Any], Any] | None = None) -> KeptGradients:
        """Those of a value that flowed."""
        places: list[Place] = []

        def place(_: Tensor) -> Place:
            places.append(Place(len(places)))
            return places[-1]

        shape = mapped(place, value, others=False)
        return KeptGradients(shape, len(places), finish)

    @staticmethod
    def in_graph(text: str, count: int) -> KeptGradients:
        """Those of a value that is still to flow, of which only its structure is known."""
        return KeptGradients(_shape(text, count), count)

    def peek(self) -> Any:
        return mapped(lambda place: peek(self.found[place.number]), self.shape, kind=Place)

    def read(self) -> Any:
        value = mapped(lambda place: read(self.found[place.number]), self.shape, kind=Place)
        return value if self.finish is None else self.finish(value)


class Place:
    """The place of a tensor in a container."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@cache
def _shape(text: str, count: int) -> Any:
    return rebuilt(text, [Place(number) for number in range(count)])


class KeepGradient:
    """The act that keeps the gradient of an output and does nothing else."""

    __slots__ = ("page", "site")

    def __init__(self, page: int, site: int) -> None:
        self.page = page
        self.site = site

    def __call__(self, pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> Receive:
        expected = self.expect(pass_, call, KeptGradients.of(value))
        copy = copied if args is UNKNOWN else frozen

        def receive(number: int, address: Address, gradient: Tensor) -> None:
            if (gradients := expected()) is not None:
                gradients.found[number] = None  # a second backward replaces the first
                gradients.found[number] = copy(gradient)

        return receive

    def expect(self, pass_: Pass, call: int, gradients: KeptGradients) -> weakref.ref[KeptGradients]:
        """Reserve the place of `gradients`; an autograd graph that lives on must not keep dropped ones alive."""
        pass_.pages[self.page].put(self.site, call, gradients)
        return weakref.ref(gradients)
