"""Recording into memory within limits: `Record` is the sink, `Ring` the store that it writes to.

A ring has a page for each pass, with an entry for each recorded value in execution order. Beginning a page drops those
that are too old, before the new pass needs the memory.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor

from torchhook.captures.store import Store, StoredValue
from torchhook.core.errors import BudgetError
from torchhook.core.event import Event, copied
from torchhook.core.kept_gradients import KeepGradient, KeptGradients
from torchhook.core.page import Keep, OutsidePage, Page
from torchhook.core.scope import Scope
from torchhook.core.shards import whole
from torchhook.core.sink import Bind, Sink
from torchhook.core.site import Port, Site
from torchhook.core.snapshot import Alias, cloned, frozen, weight
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import in_units
from torchhook.core.transfer import Transfer, free_memory
from torchhook.core.trees import Arguments, mapped

Copy = Literal["lazy", "reference", "clone"]


class Ring(Store):
    """A bounded store in memory: a mapping of site to the recorded values, oldest first.

    It keeps the newest `max_passes` passes and the newest `max_entries` values, and drops older ones. `max_bytes`
    never drops anything: the value that would exceed it raises `BudgetError`. Without any of the three,
    `max_bytes` is half of the free memory.

    >>> from torch import nn
    >>> from torchhook import Record, Ring, Session, Tap
    >>> ring, relu = Ring(max_entries=2), nn.ReLU()
    >>> with Session(relu, [Tap("", Record(ring))]):
    ...     for number in range(3):
    ...         _ = relu(torch.tensor(number))
    >>> ring[""]
    [tensor(1), tensor(2)]
    """

    def __init__(
        self, *, max_passes: int | None = None, max_entries: int | None = None, max_bytes: int | None = None
    ) -> None:
        caps = {"max_passes": max_passes, "max_entries": max_entries, "max_bytes": max_bytes}
        for name, cap in caps.items():
            if cap is not None:
                require_count(cap, name)
        if all(cap is None for cap in caps.values()):
            max_bytes = free_memory(torch.device("cpu")) // 2
        self.max_passes = max_passes
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self._pages: deque[Page] = deque()
        self._sites: dict[Site, int] = {}
        self._numbers = count()
        self._passes = 0  # pages of passes, without those of calls outside
        self._count = 0  # entries that `put` has added
        self._at_most = 0  # an upper bound of the bytes that are kept
        self._lock = threading.RLock()  # threads may share a session

    def entries(self) -> Iterator[StoredValue]:
        """Everything that is kept, in execution order, each value with its address."""
        found = [(page, entry) for page in list(self._pages) for entry in page.entries()]
        sites = self._named()  # after the entries: another thread may be adding both
        for page, (site, call, value) in found:
            yield StoredValue(page.number, sites[site], call, value, page.recomputed)

    def clear(self) -> None:
        """Drop everything that is kept."""
        with self._lock:
            self._count = 0
            for page in self._pages:
                page.kept.clear()

    def page(self, number: int, outside: bool) -> Page:
        """Begin the page of a pass, or of the calls outside after it, and drop pages that are now too old."""
        limit = self.max_passes
        if limit is None:  # a new page drops nothing, so it is listed only once it has an entry
            return Page(number, outside, listed=False)
        page = OutsidePage(number, limit) if outside else Page(number, outside, listed=True)
        self._pages.append(page)
        if not outside:
            self._passes += 1
            while self._passes > limit:  # calls outside are dropped with the pass before them
                old = self._pages.popleft()
                self._passes -= not old.outside
                self._count -= len(old.kept)
        return page

    def takes_anything(self) -> bool:
        """Whether the number of passes is the only limit."""
        return self.max_passes is not None and self.max_bytes is None and self.max_entries is None

    def site_number(self, site: Site) -> int:
        """The number that stands for `site` on the pages."""
        return self._sites.setdefault(site, next(self._numbers))  # without a lock: both are one step for other threads

    def put(self, page: Page, site: int, call: int, value: Any) -> None:
        """Keep `value`, within the limits."""
        with self._lock:
            self.require_room(site, value)
            if not page.listed:
                page.listed = True
                self._pages.append(page)
                self._passes += not page.outside
            before = len(page.kept)
            page.put(site, call, value)
            self._count += len(page.kept) - before
            while self.max_entries is not None and self._count > self.max_entries:
                self._drop_oldest()

    def require_room(self, site: int, value: Any) -> None:
        """Raise `BudgetError` if keeping `value` would exceed ``max_bytes``."""
        if self.max_bytes is None:
            return
        size = weight(value)
        with self._lock:
            if self._at_most + size > self.max_bytes:
                self._at_most = self.nbytes  # exact: without what was dropped since
                if self._at_most + size > self.max_bytes:
                    raise self._budget_error(site, size)
            self._at_most += size

    def _named(self) -> dict[int, Site]:
        return {number: site for site, number in self._sites.copy().items()}

    def _drop_oldest(self) -> None:
        while not self._pages[0].kept:
            empty = self._pages.popleft()
            empty.listed = False
            self._passes -= not empty.outside
        del self._pages[0].kept[0]
        self._count -= 1

    def _budget_error(self, site: int, size: int) -> BudgetError:
        by_site: dict[Site, int] = {}
        for entry in self.entries():
            by_site[entry.site] = by_site.get(entry.site, 0) + weight(entry.value)
        largest = sorted(by_site.items(), key=lambda item: -item[1])[:3]
        used = "; ".join(f"{in_units(held)} by the {place}" for place, held in largest) or "nothing yet"
        return BudgetError(
            f"keeping {in_units(size)} more for the {self._named()[site]} would exceed"
            f" max_bytes={self.max_bytes} ({in_units(self._at_most)} in use: {used}); select fewer sites,"
            " keep fewer passes, shrink values with transform= or dtype=, or raise max_bytes"
        )


class Record(Sink):
    """Writes the values at its sites into a store, as they flowed.

    `copy` is ``"lazy"`` (copy on write), ``"clone"``, or ``"reference"``, which keeps the tensor itself and raises
    on reading if it was overwritten since. `to` and `dtype` are the device and dtype to store. Of a sharded tensor
    the local shard is kept, or with `full` the whole tensor.

    >>> from torch import nn
    >>> from torchhook import Record, Session, Tap
    >>> model, record = nn.Sequential(nn.ReLU()), Record(dtype=torch.float16)
    >>> with Session(model, [Tap("0", record)]):
    ...     _ = model(torch.ones(2))
    >>> record.store["0"]
    [tensor([1., 1.], dtype=torch.float16)]
    """

    lazy = True

    def __init__(
        self,
        store: Store | None = None,
        *,
        copy: Copy = "lazy",
        to: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        full: bool = False,
    ) -> None:
        if store is not None and not isinstance(store, Store):
            raise TypeError(f"store must be a Store such as Ring(...), not {store!r}")
        if copy not in ("lazy", "reference", "clone"):
            raise ValueError(f"copy must be 'lazy', 'reference' or 'clone', not {copy!r}")
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {dtype!r}")
        if copy == "reference" and (to is not None or dtype is not None):
            raise ValueError("copy='reference' keeps the tensor itself; leave out to= and dtype=")
        self.store: Store = Ring(max_passes=1) if store is None else store
        self.copy = copy
        self.full = full
        self.transfer = None
        if to is not None or dtype is not None:
            self.transfer = Transfer(_device(to), dtype)
        self.plain = copy == "lazy" and not full and self.transfer is None and self.store.takes_anything()

    @property
    def keeper(self) -> Store:
        """The store begins a page with every pass."""
        return self.store

    def shortcut(self, tap: Tap, port: Port, scope: Scope) -> Bind | None:
        """Makes acts that keep outputs or their gradients, for a store whose only limit is the number of passes."""
        if self.copy == "reference" and tap.transform is not None:
            raise ValueError("copy='reference' keeps the tensor itself; leave out transform=")
        if not self.plain or port not in ("output", "grad_output") or tap.transform is not None:
            return None
        page, number_of, newest = scope.page_position(self.store), self.store.site_number, self.store.max_passes == 1
        if port == "grad_output":
            return lambda site, module: KeepGradient(page, number_of(site))
        return lambda site, module: Keep(page, number_of(site), newest)

    def expect(self, event: Event) -> Any:
        """Reserve the place of a gradient, in execution order."""
        is_nested = not isinstance(event.live, Tensor)
        gradients = KeptGradients.of(event.live, event.transform if is_nested else None)
        self.store.put(event.page, self.store.site_number(event.site), event.call, gradients)
        return weakref.ref(gradients)  # an autograd graph that lives on must not keep dropped ones alive

    def receive(self, event: Event) -> None:
        """Keep one value, or one gradient in its place."""
        number = self.store.site_number(event.site)
        if event.expected is None:
            self.store.put(event.page, number, event.call, self._kept(event))
            return
        gradients = event.expected()
        if gradients is not None:
            gradients.found[event.leaf_number] = None  # a second backward replaces the first
            kept = self._kept(event, transformed=gradients.finish is None)
            self.store.require_room(number, kept)
            gradients.found[event.leaf_number] = kept

    def _kept(self, event: Event, transformed: bool = True) -> Any:
        """What to store of the event's value."""
        live = Arguments(event.args, event.kwargs) if event.site.port == "input" else event.live
        if self.copy == "reference":
            return Alias(event.value if event.in_graph else live, event.site)
        transform = event.transform if transformed else None
        if transform is not None and isinstance(live, Arguments):
            live = live.unwrapped()
        value = mapped(copied if event.in_graph else self._copier(event.site), live)
        if transform is not None:
            value = transform(value)
        if transform is not None or self.store.max_bytes is not None:
            value = mapped(_compact, value)
        return value if self.transfer is None else self.transfer(value)

    def _copier(self, site: Site) -> Callable[[Tensor], Tensor]:
        if self.full:
            return whole
        # After a copy on write, the next write to a parameter would move its memory, but CUDA graphs and other
        # processes may point to it.
        return cloned if self.copy == "clone" or site.port in ("param", "param_grad") else frozen


def _compact(tensor: Tensor) -> Tensor:
    """`tensor`, copied if it is a view of a larger one, whose memory it must not keep alive."""
    tensor = tensor.detach()
    try:
        is_small = tensor.untyped_storage().nbytes() > tensor.nbytes
    except RuntimeError:  # sparse tensors, for example, have no storage
        return tensor
    return tensor.clone() if is_small else tensor


def _device(to: Any) -> torch.device | None:
    if to is None:
        return None
    try:
        return torch.empty(0, device=to).device
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ValueError(f"to={to!r} is not a device of this machine: {error}") from error
