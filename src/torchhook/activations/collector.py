"""Runs a model on a batch and turns the output of each site into rows: one per sample, or one per token.

Nothing waits for the device here: outputs are turned into rows, cast and copied to the host asynchronously, and only
the writer thread waits for the copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.activations.collate import PADDING, Parameters
from torchhook.core.batch import Batch, call, on_device
from torchhook.core.errors import HarvestError
from torchhook.core.event import Event
from torchhook.core.model_state import evaluating, random_state_kept
from torchhook.core.selection import Query, Selector, queries_of, require_module
from torchhook.core.session import Session
from torchhook.core.silent import OnSilent
from torchhook.core.sink import Sink
from torchhook.core.site import Site
from torchhook.core.snapshot import Held
from torchhook.core.tap import Tap
from torchhook.core.text import shape_of
from torchhook.core.transfer import Transfer, sent_home
from torchhook.core.trees import leaves
from torchhook.stats.kernels.plain import FIELDS
from torchhook.stats.moments import Moments
from torchhook.stats.stat import counted

_CPU = torch.device("cpu")
_LOW, _HIGH = FIELDS.index("min"), FIELDS.index("max")
_BAD = slice(FIELDS.index("nan"), FIELDS.index("neginf") + 1)  # a list of indices would be copied to the device
_INTEGERS = (torch.int64, torch.int32)

RowsName = Literal["auto", "sample", "token"]
"""What one row is: always a sample, always a token, or a token if the batch has tokens and a sample if not."""


@dataclass(frozen=True)
class Wanted:
    """What to harvest of a model, and how."""

    sites: Query | Iterable[Query]
    transform: Callable[[Any], Any] | None = None
    dtype: torch.dtype | None = None  # None: the dtype of the output
    rows: RowsName = "auto"
    keep: tuple[str, ...] = ()  # entries of the batch to store beside the sites
    stop: bool = False


class Measurement(NamedTuple):
    """Statistics of some rows."""

    moments: Tensor  # of the values before they were cast
    overflow: int


@dataclass(frozen=True)
class SentRows:
    """The rows of a batch at one site, on their way to the host."""

    values: Callable[[], Tensor]  # waits for the copy
    measured: Callable[[], Measurement] | None  # None: not floating-point
    lengths: list[int] | None  # rows per sample; None: one each
    shape: tuple[int, ...]  # of one row
    dtype: torch.dtype
    given: torch.dtype  # before the cast
    nbytes: int


class Collector(Sink):
    """Runs a model on batches and sends the rows of its sites to the host.

    >>> model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    >>> with Collector(model, Wanted("1", dtype=torch.float16)) as collector:
    ...     sent = collector.collect(torch.ones(4, 3), 4)
    >>> sent["1"].values().shape, sent["1"].dtype
    (torch.Size([4, 2]), torch.float16)
    """

    lazy = True

    def __init__(self, model: nn.Module, wanted: Wanted, on_silent: OnSilent | None = None) -> None:
        require_module(model)
        self.model = model
        self._wanted = wanted
        self._fetch = Transfer(_CPU, None)
        self._device = next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None)
        self._samples = 0
        self._positions: Positions | None = None
        self._sent: dict[str, SentRows] | None = None  # None outside `collect`: other code may call the modules, too
        self._open = ExitStack()
        tap = Tap(Selector.union(queries_of(wanted.sites)), self, transform=wanted.transform)
        self._session = Session(model, [tap], stop=wanted.stop, detach_on_error=False, on_silent=on_silent)

    def __enter__(self) -> Collector:
        with ExitStack() as opening:
            opening.enter_context(random_state_kept(self.model))
            opening.enter_context(evaluating(self.model))
            self._session.open()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._open:
            self._session.__exit__(kind, error, trace)

    def collect(self, data: Any, samples: int) -> dict[str, SentRows]:
        """Run the model on a batch of this many samples, and return the rows of each site and kept entry."""
        whole = Batch.of(data)
        batch = Batch.of(on_device(self._arguments(data), self.model))
        self._positions = positions_of(whole, samples, self._wanted.rows, self._device)
        self._samples, self._sent = samples, {}
        try:
            with torch.no_grad():
                call(self.model, batch)
            for name in self._wanted.keep:
                self._keep(name, _entry(whole, name))
            return self._sent
        finally:
            self._sent = None

    def receive(self, event: Event) -> None:
        """Send the value of an event to the host."""
        if self._sent is not None:
            self._take(event.site, event.call, event.live if event.transform is None else event.value)

    def _take(self, site: Site, call: int, value: Any) -> None:
        assert self._sent is not None
        name, positions = site.path + (f"@{call}" if call else ""), self._positions
        if name in self._sent:
            raise HarvestError(f"{name!r} names both a module and a later call of another module; rename the module")
        if self._wanted.transform is None:
            value = chosen(value)
        elif self._wanted.rows == "auto":
            positions = None  # the result of a transform has one row per sample
        self._sent[name] = self._send(rows_of(value, self._samples, positions, name), self._wanted.dtype)

    def _keep(self, name: str, value: Tensor) -> None:
        assert self._sent is not None
        if name in self._sent:
            raise HarvestError(f"{name!r} names both a site and an entry in keep=; rename the entry")
        mine = value.clone()  # the user may write to the batch through numpy, which no copy on write notices
        self._sent[name] = self._send(rows_of(mine, self._samples, self._positions, name, kept=True), None)

    def _arguments(self, data: Any) -> Any:
        """The batch without the entries that the model does not take: those only to be kept, and our padding mask."""
        if not isinstance(data, Mapping):
            return data
        known, only_kept = Parameters.of(self.model), (*self._wanted.keep, PADDING)
        return {
            name: x for name, x in data.items() if (name in known.names if name in only_kept else known.takes(name))
        }

    def _send(self, rows: BatchRows, dtype: torch.dtype | None) -> SentRows:
        given = rows.values
        dtype = dtype if dtype is not None and given.is_floating_point() else given.dtype
        stored = given.to(dtype).contiguous()
        if stored is given:  # the model may overwrite it; not a copy on write, since another thread lets go of it
            stored = stored.clone()
        pending = self._fetch(stored)
        return SentRows(
            values=pending.read if isinstance(pending, Held) else lambda: pending,
            measured=_measured(given, stored) if given.is_floating_point() and given.numel() else None,
            lengths=rows.lengths,
            shape=tuple(stored.shape[1:]),
            dtype=dtype,
            given=given.dtype,
            nbytes=stored.nbytes,
        )


def _measured(given: Tensor, stored: Tensor) -> Callable[[], Measurement]:
    """Computes the moments of the values and counts those that overflowed; only reading the result waits."""
    moments = Moments()
    state = moments.empty(given)
    moments.update(state, given)
    state = moments.settle(state[None])[0]
    narrower = torch.finfo(stored.dtype).max < torch.finfo(given.dtype).max
    on_host = given.device.type == "cpu"
    if narrower and on_host:  # reading min and max is free here, and saves most counts
        narrower = max(-float(state[_LOW]), float(state[_HIGH])) > torch.finfo(stored.dtype).max
    bad = stored.isfinite().logical_not_().sum().to(state.dtype) if narrower else state[_BAD].sum()
    home = sent_home(torch.cat([state, bad[None]]))

    def read() -> Measurement:
        *values, bad = home().tolist()
        return Measurement(torch.tensor(values, dtype=torch.float64), int(bad - sum(values[_BAD])))

    return read


def _entry(batch: Batch, name: str) -> Tensor:
    """The entry of a batch that `keep` names."""
    found = batch.arguments.kwargs.get(name) if name != "target" or batch.arguments.kwargs else batch.target
    if found is None:
        there = ", ".join(map(repr, batch.arguments.kwargs)) or "'target'"
        raise HarvestError(f"keep: the batch has no {name!r}; it has {there}")
    try:
        return torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError):
        raise HarvestError(f"keep: {name!r} is not numeric and cannot be stored; leave it out of keep") from None


def single(data: Any, number: int, samples: int) -> Any:
    """One sample of a batch, as a batch of its own.

    >>> single({"x": torch.tensor([[1], [2]]), "names": ["a", "b"]}, 1, 2)
    {'x': tensor([[2]]), 'names': ['b']}
    """
    if isinstance(data, Tensor):
        return data[number : number + 1] if data.dim() and len(data) == samples else data
    if isinstance(data, Mapping):
        return {key: single(value, number, samples) for key, value in data.items()}
    if isinstance(data, (list, tuple)) and len(data) == samples and not any(isinstance(x, Tensor) for x in data):
        return data[number : number + 1]
    if isinstance(data, (list, tuple)):
        return [single(value, number, samples) for value in data]
    return data


class Tokens(NamedTuple):
    """Which positions of a batch are tokens and not padding."""

    width: int | None  # positions per sample; None: as many as the output has
    lengths: list[int]  # tokens of each sample; empty: all positions
    places: Tensor | None  # flat indices of the tokens, on the device of the model; None if there is no padding


class Positions(NamedTuple):
    """The tokens of a batch; an encoder-decoder model has those of its input and those of its output."""

    read: Tokens | None
    decoded: Tokens | None = None
    deep: bool = False  # whether a row may have several dimensions, such as heads × features


class BatchRows(NamedTuple):
    """The rows of a batch at one site."""

    values: Tensor
    lengths: list[int] | None  # rows per sample; None: one each


def positions_of(batch: Batch, samples: int, rows: RowsName, device: torch.device | None) -> Positions | None:
    """The tokens of a batch, by its attention masks or, without them, by its first table of integers.

    >>> positions_of(Batch.of({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}), 2, "auto", None).read
    Tokens(width=3, lengths=[2, 3], places=tensor([0, 1, 3, 4, 5]))
    """
    if rows == "sample":
        return None
    entries = batch.arguments.kwargs
    mask = _table(entries.get("attention_mask", entries.get(PADDING)), samples)
    other = _table(entries.get("decoder_attention_mask"), samples)
    written = _table(entries.get("decoder_input_ids"), samples)
    tables = (_table(leaf, samples) for _, leaf in leaves(batch.arguments) if leaf.dtype in _INTEGERS)
    ids = next((table for table in tables if table is not None), None)
    read = _masked(mask, device) or _unmasked(ids) or (Tokens(None, [], None) if rows == "token" else None)
    decoded = _masked(other, device) or _unmasked(written)
    return None if read is None else Positions(read, decoded, rows == "token")


def _table(entry: Any, samples: int) -> Tensor | None:
    return entry if isinstance(entry, Tensor) and entry.dim() == 2 and len(entry) == samples else None


def _masked(mask: Tensor | None, device: torch.device | None) -> Tokens | None:
    if mask is None:
        return None
    valid = mask.cpu() != 0
    places = None if bool(valid.all()) else valid.flatten().nonzero().flatten().to(device)
    return Tokens(mask.shape[1], valid.sum(1).tolist(), places)


def _unmasked(ids: Tensor | None) -> Tokens | None:
    return None if ids is None else Tokens(ids.shape[1], [], None)


def rows_of(value: Any, samples: int, positions: Positions | None, site: str, *, kept: bool = False) -> BatchRows:
    """The rows of a site's output for a batch of this many samples, or of an entry of the batch that is `kept`.

    A list or nested tensor with one tensor per sample, as a transform may return it, has the rows of those tensors.

    >>> rows_of([torch.ones(2, 4), torch.ones(1, 4)], 2, None, "fc").lengths
    [2, 1]
    """
    if isinstance(value, Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, (list, tuple)):
        return _of_list(value, samples, site)
    if not isinstance(value, Tensor):
        raise HarvestError(f"{site!r} returned a {type(value).__name__}, not a tensor; pass transform= to convert it")
    x = _plain(value, site)
    for tokens in _candidates(positions, x, samples, site, kept):
        flat = x if x.shape[0] != samples else x.flatten(0, 1)
        lengths = tokens.lengths or [len(flat) // samples] * samples
        return BatchRows(flat if tokens.places is None else flat.index_select(0, tokens.places.to(x.device)), lengths)
    if not x.dim() or len(x) != samples:
        raise HarvestError(
            f"the output of {site!r} is {shape_of(x)} for a batch of {samples}, not one row per sample; pass a"
            " transform= that returns rows, or a list with one tensor per sample"
        )
    return BatchRows(x, None)


def _candidates(positions: Positions | None, x: Tensor, samples: int, site: str, kept: bool) -> list[Tokens]:
    """The tokens that the rows of `x` belong to: one `Tokens` or none; raises if both fit."""
    if positions is None:
        return []
    fits = [
        tokens for tokens in positions[:2] if tokens is not None and _fits(x, samples, tokens, positions.deep, kept)
    ]
    named = site.replace("_", ".").split(".")
    if len(fits) < 2 and not (positions.decoded is not None and "decoder" in named):
        return fits
    if "decoder" in named:
        return [tokens for tokens in fits if tokens is positions.decoded]
    if "encoder" in named or _same(*fits):
        return fits[:1]
    raise HarvestError(
        f"the output of {site!r} is {shape_of(x)}, and both attention masks of the batch fit; pass a transform= that"
        " returns a list with one tensor per sample, or rows='sample'"
    )


def _same(a: Tokens, b: Tokens) -> bool:
    if a.places is None or b.places is None:
        return a.places is b.places
    return torch.equal(a.places, b.places)


def _fits(x: Tensor, samples: int, tokens: Tokens, deep: bool, kept: bool) -> bool:
    """Whether `x` has one row per position."""
    if kept:
        return x.dim() == 2 and not x.is_floating_point() and x.shape == (samples, tokens.width)
    if x.dim() > 2 and len(x) == samples:
        return (deep or x.dim() == 3) and tokens.width in (None, x.shape[1])
    return x.dim() > 1 and tokens.width is not None and len(x) == samples * tokens.width != samples


def _of_list(parts: Sequence[Any], samples: int, site: str) -> BatchRows:
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim()]
    if len(parts) != samples or len(tensors) != samples:
        raise HarvestError(
            f"{site!r} returned a list of {len(tensors)} tensors for a batch of {samples}; it needs one per sample"
        )
    return BatchRows(torch.cat([_plain(part, site) for part in tensors]), [len(part) for part in tensors])


def _plain(x: Tensor, site: str) -> Tensor:
    """A tensor of any kind as a plain one of the same shape."""
    if x.is_complex():
        raise HarvestError(
            f"{site!r} returned complex numbers, which cannot be stored; pass transform=torch.view_as_real"
        )
    return counted(x)


def chosen(value: Any) -> Any:
    """The main tensor of an output: the first floating-point one, or else the first."""
    if isinstance(value, Tensor):
        return value
    found = [leaf for _, leaf in leaves(value)]
    return next((leaf for leaf in found if leaf.is_floating_point()), found[0] if found else value)
