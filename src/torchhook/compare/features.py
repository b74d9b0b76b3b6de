"""The features of a model at some of its places: a matrix with a row a sample for every call, as it flows."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchhook.captures.agreement.recorded_run import fitted
from torchhook.core.batch import Batch, call
from torchhook.core.errors import SelectionError
from torchhook.core.event import Event
from torchhook.core.model_state import evaluating
from torchhook.core.passes import Pass, Scope
from torchhook.core.selection import Query, Selector, require_module, select
from torchhook.core.session import Session
from torchhook.core.site import Site
from torchhook.core.snapshot import frozen
from torchhook.core.tap import Act, Sink, Tap, at_once
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves
from torchhook.stats import Channels
from torchhook.stats.stat import counted

Pool: TypeAlias = Literal["flatten", "mean"] | Callable[[Tensor], Tensor]
"""How the output of a layer becomes a row a sample: all of it, the mean of each channel, or as a function says."""


class Place(NamedTuple):
    """A layer as it is executed: which module, and which of its calls in the pass."""

    path: str
    call: int

    def __str__(self) -> str:
        return f"{self.path or 'the model'!r}" + (f" (call {self.call})" if self.call else "")


class Samples(NamedTuple):
    """How many samples a batch has, and which argument of the model says so."""

    length: int
    argument: str


Take = Callable[[Place, "Tensor | str"], None]
"""Takes the features of a call, or the reason why there are none."""


class Gathering(Sink):
    """Runs a model on batches and hands over the features at its sites, each the moment that it flows.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten())
    >>> with Gathering(model, None, "flatten") as gathering:
    ...     _ = gathering.run(torch.ones(2, 3, 5, 5), lambda place, rows: print(place, tuple(rows.shape)))
    '0' (2, 100)
    '1' (2, 100)
    """

    def __init__(self, model: nn.Module, sites: Query | Iterable[Query] | None, pool: Pool) -> None:
        self.model = model
        self.pool = pool
        self._samples = Samples(0, "")
        self._take: Take | None = None  # while it runs: others, too, may call what this model is made of
        self._open = ExitStack()
        # what of every leaf is not called is told by `silent`
        tap = Tap(Selector.union(queries_of(sites)), self)
        self._session = Session(model, [tap], on_silent="ignore" if sites is None else None)

    def __enter__(self) -> Gathering:
        with ExitStack() as opening:
            opening.enter_context(as_before(self.model))
            opening.enter_context(evaluating(self.model))
            self._session.attach()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            self._session.__exit__(kind, error, trace)

    @property
    def silent(self) -> dict[str, str]:
        """The paths that were never called, and why; known at the end."""
        return {site.path: reason for site, reason in self._session.silent.items()}

    def run(self, data: Any, take: Take) -> int:
        """Run the model on one batch; how many samples it has."""
        batch = Batch.of(fitted(data, self.model))
        self._samples, self._take = samples_of(batch), take
        try:
            with torch.no_grad():
                call(self.model, batch)
        finally:
            self._take = None
        return self._samples.length

    def receive(self, event: Event) -> None:
        """Hand over what one event has."""
        self._hand_over(Place(event.path, event.call), event.module, event.live)

    def bind(self, tap: Tap, site: Site, module: nn.Module, scope: Scope) -> Act:
        """The act that does so at one site, without events."""

        @at_once
        def see(pass_: Pass, call: int, value: Any, args: tuple[Any, ...]) -> None:
            self._hand_over(Place(site.path, call), module, value)

        return see

    def _hand_over(self, place: Place, module: nn.Module, value: Any) -> None:
        if self._take is not None:
            self._take(place, rows_of(value, module, self._samples, self.pool))


def samples_of(batch: Batch) -> Samples:
    """As many as the arguments are long: of those that are more than a list of numbers, as most of the batch is.

    >>> samples_of(Batch.of({"scale": torch.ones(3), "x": torch.ones(40, 5)}))
    Samples(length=40, argument="'x'")
    """
    given = [(address, leaf) for address, leaf in leaves(batch.arguments) if leaf.dim()]
    if not given:
        raise ValueError("a batch of the loader has no tensor with a dimension for the samples in it")
    lengths = Counter(len(leaf) for _, leaf in leaves((batch.arguments, batch.target)) if leaf.dim())
    likely = [(address, leaf) for address, leaf in given if leaf.dim() > 1] or given
    (_, *argument), found = max(likely, key=lambda one: lengths[len(one[1])])  # the first of those that are as likely
    return Samples(len(found), ".".join(map(repr, argument)))


def rows_of(value: Any, module: nn.Module, samples: Samples, pool: Pool) -> Tensor | str:
    """The features of the samples in what `module` gave, or the reason why there are none."""
    found = next((leaf for _, leaf in leaves(value) if leaf.is_floating_point()), None)
    if found is None:
        return "it gives no tensor of real numbers"
    x: Any = counted(found)
    if callable(pool):
        x = pool(frozen(x))
    elif pool == "mean" and x.dim() > 2:
        units = Channels().bound(module)
        assert isinstance(units, Channels)
        x = x.movedim(units.placed(x)[1], 1).flatten(2).mean(2)
    if not isinstance(x, Tensor):
        return f"pool made a {type(x).__name__} of it, and not a tensor"
    if not x.dim() or len(x) != samples.length:
        return (
            f"it gives {shape_of(x)} for a batch of {samples.length} (so long is the argument {samples.argument}),"
            " which is not a row a sample; pool= a function makes rows"
        )
    rows = x.reshape(len(x), -1)
    return rows if rows.is_floating_point() else rows.float()


def queries_of(sites: Query | Iterable[Query] | None) -> Sequence[Query]:
    """One query, several, or none, which means every leaf, as a list."""
    if sites is None:
        return []
    many = isinstance(sites, Iterable) and not isinstance(sites, (str, nn.Module))
    return list(sites) if many else [sites]  # type: ignore[arg-type, list-item]  # modules can be iterable, too


def require_sites(model: nn.Module, sites: Query | Iterable[Query] | None, argument: str, hint: str = "") -> None:
    """Raise unless `sites` are places of `model`, before anything runs."""
    queries = queries_of(sites)
    if sites is not None and not queries:
        raise SelectionError(f"{argument} is empty: name at least one place of the model, or leave it out for all")
    try:
        select(model, *queries)
    except SelectionError as error:
        raise SelectionError(f"{argument}: {error}{hint}") from error


def require_pool(pool: Any) -> None:
    """Raise unless `pool` is one of those there are."""
    if not (callable(pool) or pool in ("flatten", "mean")):
        raise ValueError(f"pool must be 'flatten', 'mean' or a function from an output to rows, not {pool!r}")


def require_loader(loader: Any, argument: str) -> None:
    """Raise unless `loader` can be looped over for batches."""
    if isinstance(loader, Tensor) or not isinstance(loader, Iterable):
        raise TypeError(
            f"{argument} must give batches, as a DataLoader or a list of them does, and it is a"
            f" {type(loader).__name__}; put the batch you have into a list"
        )


def length_of(loader: Iterable[Any]) -> int | None:
    """How many batches there are, if that is known."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of a stream
        return None


@contextmanager
def as_before(*models: nn.Module) -> Iterator[None]:
    """Whatever draws random numbers meanwhile, every generator is then where it was."""
    for model in models:
        require_module(model)
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    devices = {p.device.index or 0 for model in models for p in model.parameters() if p.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
