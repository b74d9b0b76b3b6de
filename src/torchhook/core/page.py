"""The page of a pass: what a store keeps of it. Only this file knows what an entry of a page looks like.

An entry is a tuple (number of the site, call, value) or, on the fastest path, an object that holds the newest value at
one site itself and has the attributes `site` and `value`. A call of None is found by counting the site's entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torchhook.core.snapshot import Held, snapshot


class Page:
    """What is kept of one pass, in execution order."""

    __slots__ = ("kept", "listed", "number", "outside", "recomputed")

    def __init__(self, number: int, outside: bool, listed: bool) -> None:
        self.kept: list[Any] = []
        self.number = number
        self.recomputed = False  # whether a checkpoint repeated its calls in the backward
        self.outside = outside  # whether it has calls of submodules outside of any forward of the model
        self.listed = listed  # whether the store lists it already; otherwise it will, once there is an entry

    def put(self, site: int, call: int | None, value: Any) -> None:
        """Keep one value."""
        self.kept.append((site, call, value))

    def entries(self) -> Iterator[tuple[int, int, Any]]:
        """The number of the site, the call and the value of every entry, oldest first."""
        calls: dict[int, int] = {}
        for entry in list(self.kept):
            site, call, value = entry if isinstance(entry, tuple) else (entry.site, None, entry.value)
            calls[site] = calls.get(site, -1) + 1
            if isinstance(value, Held) and not value.came():
                continue
            yield site, calls[site] if call is None else call, value


class OutsidePage(Page):
    """The calls outside of any pass, of which the newest `limit` at each site are kept."""

    __slots__ = ("limit",)

    def __init__(self, number: int, limit: int) -> None:
        super().__init__(number, outside=True, listed=True)
        self.limit = limit

    def put(self, site: int, call: int | None, value: Any) -> None:
        """Keep one value, and drop the oldest at its site if there are too many."""
        super().put(site, call, value)
        same = [position for position, entry in enumerate(self.kept) if entry[0] == site]
        if len(same) > self.limit:
            del self.kept[same[0]]


class Keeper(Protocol):
    """Keeps a page for each pass: a store."""

    def page(self, number: int, outside: bool) -> Page:
        """Begin the page of pass `number`, or of the calls outside of any pass after it."""


class Keep:
    """The act that puts a snapshot onto the page of its pass and does nothing else, as most taps do.

    If it is the only act at a site and only the `newest` pass is kept, the hook does this itself (`KeepHook`).
    """

    __slots__ = ("newest", "page", "site")

    def __init__(self, page: int, site: int, newest: bool) -> None:
        self.page = page
        self.site = site
        self.newest = newest and page == 0

    def __call__(self, pass_: Any, call: int, value: Any, args: tuple[Any, ...]) -> None:
        pass_.pages[self.page].put(self.site, call, snapshot(value))


class Newest:
    """The newest value at a site, itself an entry of a page: memory that was freed just now is the fastest to get."""

    __slots__ = ("number", "site", "value")
    number: int  # of the pass that the value is from, at first `NEVER`
    site: int
    value: Any


NEVER = -2
"""A number that no pass has."""
