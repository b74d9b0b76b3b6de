"""A store keeps recorded values within limits, and is read as a mapping of site to values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from torchhook.core.errors import NotRecordedError
from torchhook.core.page import Page
from torchhook.core.site import Site
from torchhook.core.snapshot import meaningful, read, weight
from torchhook.core.text import in_units
from torchhook.core.trees import Arguments


class StoredValue(NamedTuple):
    """One recorded value with its address."""

    pass_number: int
    site: Site
    call: int
    value: Any
    recomputed: bool = False

    def read(self) -> Any:
        """The value as the user sees it: arrived, still valid, without a graph, and unwrapped."""
        value = read(self.value)
        if isinstance(value, Tensor):
            meaningful(value)
            return value.detach() if value.requires_grad else value  # it does after enable_grad inside no_grad
        return value.unwrapped() if isinstance(value, Arguments) else value


class Store(Mapping[Any, list[Any]]):
    """A bounded mapping of site to the recorded values, oldest first.

    A key is a `Site`, a path (for its output) or a pair of path and port. `Ring` is the store in memory.
    """

    max_passes: int | None
    max_bytes: int | None

    @abstractmethod
    def entries(self) -> Iterator[StoredValue]:
        """Everything that is kept, in execution order, each value with its address."""

    @abstractmethod
    def page(self, number: int, outside: bool) -> Page:
        """Begin the page of a pass, or of the calls outside after it, and drop pages that are now too old."""

    @abstractmethod
    def site_number(self, site: Site) -> int:
        """The number that stands for `site` on the pages."""

    @abstractmethod
    def put(self, page: Page, site: int, call: int, value: Any) -> None:
        """Keep `value`, within the limits."""

    @abstractmethod
    def require_room(self, site: int, value: Any) -> None:
        """Raise `BudgetError` if keeping `value` would exceed ``max_bytes``."""

    @abstractmethod
    def takes_anything(self) -> bool:
        """Whether values may be put onto a page directly, since there is no limit to check."""

    __eq__ = object.__eq__  # two stores are never equal, not even while both are empty
    __hash__ = object.__hash__

    @property
    def nbytes(self) -> int:
        """The size of everything that is kept, in bytes."""
        return sum(weight(entry.value) for entry in self.entries())

    def __getitem__(self, key: Any) -> list[Any]:
        site = _site_of(key)
        values = [entry.read() for entry in self.entries() if entry.site == site]
        if not values:
            kept = ", ".join(map(str, list(self)[:5])) or "nothing"
            raise NotRecordedError(f"no {site} is kept; kept are: {kept}")
        return values

    def __iter__(self) -> Iterator[Site]:
        return iter(dict.fromkeys(entry.site for entry in self.entries()))

    def __len__(self) -> int:
        return sum(1 for _ in iter(self))

    def __repr__(self) -> str:
        values = sum(1 for _ in self.entries())
        return f"{type(self).__name__}({values} values of {len(self)} sites, {in_units(self.nbytes)})"


def _site_of(key: Any) -> Site:
    if isinstance(key, str):
        return Site(key)
    if isinstance(key, tuple) and len(key) == 2:
        return Site(*key)
    raise TypeError(f"a key must be a Site, a path or a pair of path and port, not {key!r}")
