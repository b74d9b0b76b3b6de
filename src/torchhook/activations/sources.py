"""Data of any kind as numbered batches that can be read from any number on.

A batch has the same number and the same samples each time it is read, so that a harvest can resume and workers can
divide the batches among them. The id of a sample is its index in the data set or, without one, its position in the
stream.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from itertools import count, islice
from operator import index
from typing import Any, NamedTuple, overload

from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, default_collate

from torchhook.activations.collate import (
    FaultTolerantDataset,
    Parameters,
    batch_of_columns,
    batch_of_rows,
    collated,
    error_text,
    tensor_of,
)
from torchhook.core.batch import Batch, ToInputs, batch_count, samples_of
from torchhook.core.errors import HarvestError
from torchhook.core.tap import require_count
from torchhook.core.trees import mapped

_SIZE = 32  # samples per batch, if `batch_size` is not given
_ONCE = "an iterator can be read only once; pass a list, a class with __iter__, or resume=False"
_SHUFFLED = "its order is different each time; pass shuffle=False to the DataLoader, or resume=False"
_UNORDERED = "its batches come in no fixed order; pass in_order=True to the DataLoader, or resume=False"


class ReadBatch(NamedTuple):
    """One batch as it was read."""

    number: int
    ids: Sequence[int]  # of the samples in `data`, in order
    data: Any  # an argument for `Batch.of`, on the host; None if no sample could be read
    unread: dict[int, str]  # id → reason, of the samples that could not be read


class Source(ABC):
    """Numbered batches of samples."""

    kind: str  # part of the fingerprint in each manifest: if it changes, existing stores cannot be resumed
    samples: int | None = None  # None if the number is unknown
    batches: int | None = None
    repeats: bool = True  # whether reading again yields the same batches in the same order
    indexed: bool = False  # whether a batch can be read without reading those before it
    why_not: str = ""  # why it does not repeat, and what to do about it

    @abstractmethod
    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        """The batches from `start` up to `stop`; with `skip`, samples that cannot be read are listed as `unread`."""


def source_of(
    data: Any, batch_size: int | None, model: nn.Module, keep: Iterable[str] = (), to_inputs: ToInputs | None = None
) -> Source:
    """`data` as a source of batches for `model`, which also have the entries that `keep` names.

    >>> import torch
    >>> source = source_of(torch.arange(10.0).view(5, 2), 2, nn.Linear(2, 1))
    >>> source.samples, source.batches
    (5, 3)
    >>> [(read.number, list(read.ids)) for read in source.read(1)]
    [(1, [2, 3]), (2, [4])]
    """
    if batch_size is not None:
        require_count(batch_size, "batch_size")
    parameters, size = Parameters.of(model, keep, to_inputs), batch_size or _SIZE
    in_samples = _of_samples(data, size, parameters)
    if in_samples is not None:
        return in_samples
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise TypeError(
            f"data must be a DataLoader, an iterable of batches, a data set or a tensor of samples, not a"
            f" {type(data).__name__}; put a single batch into a list, and choose one of several splits"
        )
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} is for data that come as single samples, but a {type(data).__name__} yields"
            " batches; leave batch_size out"
        )
    return _of_loader(data, parameters) if isinstance(data, DataLoader) else _of_batches(data, parameters)


class TensorSource(Source):
    """A tensor or an array whose rows are samples."""

    kind = "Rows"
    indexed = True

    def __init__(self, rows: Any, size: int) -> None:
        if not rows.ndim or tensor_of(rows[:0]) is None:
            raise TypeError("data: a tensor or an array needs numbers and a dimension for the samples")
        self._rows, self._plan = rows, Consecutive(len(rows), size)
        self.samples, self.batches = len(rows), len(self._plan)

    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        for number in _numbers(start, stop, len(self._plan)):
            ids = self._plan[number]
            yield ReadBatch(number, ids, _on_host(tensor_of(self._rows[ids.start : ids.stop])), {})


class IndexedSource(Source):
    """A data set with indices, read by our own DataLoader over a list of batches."""

    kind = "Indexed"
    indexed = True

    def __init__(
        self,
        dataset: Any,
        plan: Sequence[Sequence[int]],
        collate: Callable[[list[Any]], Any],
        parameters: Parameters,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, collate
        self._parameters, self._options = parameters, dict(options or {})
        self.batches = len(plan)
        self.samples = plan.samples if isinstance(plan, Consecutive) else sum(map(len, plan))

    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        numbers = _numbers(start, stop, len(self._plan))
        loader: DataLoader[Any] = DataLoader(
            FaultTolerantDataset(self._dataset, skip),  # type: ignore[arg-type]  # reads several samples at once
            batch_sampler=(list(self._plan[number]) for number in numbers),
            collate_fn=partial(collated, self._collate, skip),
            **self._options,
        )
        for number, found in _numbered(loader, start):
            ids = [index for index in self._plan[number] if index not in found.unread]
            data = _fitted(found.batch, self._parameters) if ids else None
            yield ReadBatch(number, ids if found.unread else self._plan[number], data, found.unread)


class StreamSource(Source):
    """Batches in the order of an iterable: to start at one of them, those before it are read and dropped."""

    kind = "Stream"

    def __init__(self, data: Iterable[Any], parameters: Parameters, why_not: str = "") -> None:
        self._data, self._parameters = data, parameters
        self._started = False
        self.repeats, self.why_not = not why_not, why_not
        self.batches = None if isinstance(getattr(data, "dataset", None), IterableDataset) else batch_count(data)
        self.indexed = isinstance(data, (list, tuple))  # skipping batches costs nothing there
        if self.indexed:
            self.samples = sum(len(read.ids) for read in self.read())

    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        if self._started and self.why_not == _ONCE:
            raise HarvestError(f"data was already read: {_ONCE}")
        self._started = True
        first_id = 0
        for number, batch in islice(_numbered(self._data, 0), stop):
            try:
                data = _fitted(batch, self._parameters)
                ids = range(first_id, first_id + samples_of(Batch.of(data)).length)
            except ValueError as error:
                raise HarvestError(f"batch {number} of data: {error}") from error
            first_id = ids.stop
            if number >= start:
                yield ReadBatch(number, ids, data, {})


class Consecutive(Sequence[range]):
    """The indices of each batch when all samples are taken in order, `size` at a time; computed, not stored.

    >>> list(Consecutive(5, 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """

    def __init__(self, samples: int, size: int) -> None:
        self.samples, self.size = samples, size

    def __len__(self) -> int:
        return -(-self.samples // self.size)

    @overload
    def __getitem__(self, number: int) -> range: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[range]: ...

    def __getitem__(self, number: int | slice) -> range | Sequence[range]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        return range(number * self.size, min((number + 1) * self.size, self.samples))


def _numbered(batches: Iterable[Any], first: int) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers; an error while reading names the number of the batch."""
    iterator = None
    for number in count(first):
        try:
            iterator = iter(batches) if iterator is None else iterator
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            iterator = None
            if getattr(batches, "num_workers", 0):  # the traceback would keep the workers alive for ten seconds
                error.__traceback__ = None
            if isinstance(error, HarvestError):
                raise
            raise HarvestError(
                f"cannot read batch {number} of data, or any batch after it: {error_text(error)}"
            ) from error
        yield number, batch


def _of_samples(data: Any, size: int, parameters: Parameters) -> Source | None:
    """The source for data that come as single samples; None for data of another kind."""
    numpy: Any = sys.modules.get("numpy")
    if isinstance(data, Tensor) or (numpy is not None and isinstance(data, numpy.ndarray)):
        return TensorSource(data, size)
    if _is(data, "datasets.arrow_dataset", "Dataset"):
        data = _formatted(data, parameters)
        return IndexedSource(
            data, Consecutive(len(data), size), partial(batch_of_rows, parameters=parameters), parameters
        )
    if _is(data, "datasets.iterable_dataset", "IterableDataset"):
        return StreamSource(StreamedBatches(data, size, parameters), parameters)
    if _is(data, "ray.data.dataset", "Dataset"):
        source = StreamSource(RayBatches(data, size, parameters), parameters)
        if _is(data, "ray.data.dataset", "MaterializedDataset"):  # counting another may compute all of it
            source.samples = data.count()
            source.batches = len(Consecutive(source.samples, size))
        return source
    if isinstance(data, IterableDataset):
        return _of_loader(DataLoader(data, batch_size=size), parameters)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not isinstance(data, (Iterable, Mapping))):
        return IndexedSource(data, Consecutive(_samples(data), size), default_collate, parameters)
    return None


def _of_loader(loader: DataLoader[Any], parameters: Parameters) -> Source:
    if type(loader).__iter__ is not DataLoader.__iter__:  # a subclass may change its batches
        return _of_batches(loader, parameters)
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return StreamSource(_again(loader), parameters, _why_not(loader))
    sampler = loader.batch_sampler
    if type(sampler) is BatchSampler and type(sampler.sampler) is SequentialSampler:
        samples, size = len(sampler.sampler), sampler.batch_size
        plan: Any = Consecutive(samples - samples % size if sampler.drop_last else samples, size)
        return IndexedSource(loader.dataset, plan, loader.collate_fn, parameters, _options(loader))
    try:
        plan = [list(map(index, batch)) for batch in sampler]
    except TypeError:  # the keys of this data set are not integers
        return StreamSource(_again(loader), parameters, _why_not(loader))
    source = IndexedSource(loader.dataset, plan, loader.collate_fn, parameters, _options(loader))
    if plan != [list(map(index, batch)) for batch in sampler]:
        source.repeats, source.why_not = False, _SHUFFLED
    return source


def _of_batches(data: Iterable[Any], parameters: Parameters) -> Source:
    return StreamSource(data, parameters, _ONCE if isinstance(data, Iterator) else "")


def _again(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same batches that can be read twice at once, which persistent workers do not allow."""
    if not loader.persistent_workers:
        return loader
    options = _options(loader)
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(
        loader.dataset, loader.batch_size, drop_last=loader.drop_last, collate_fn=loader.collate_fn, **options
    )


def _why_not(loader: DataLoader[Any]) -> str:
    """Why reading the loader again yields other batches; empty if it yields the same."""
    if isinstance(loader.dataset, Iterator):
        return _ONCE
    if loader.num_workers > 1 and not loader.in_order:
        return _UNORDERED
    drawn = not isinstance(loader.dataset, IterableDataset) and type(loader.sampler) is not SequentialSampler
    return _SHUFFLED if drawn and list(loader.sampler) != list(loader.sampler) else ""


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a DataLoader, to make another one for the same data set."""
    names = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "generator"]
    if loader.num_workers:
        names += ["prefetch_factor", "multiprocessing_context"]
    return {name: getattr(loader, name) for name in names}


class StreamedBatches:
    """The batches of a streamed Hugging Face data set."""

    def __init__(self, dataset: Any, size: int, parameters: Parameters) -> None:
        self._dataset, self._size, self._parameters = dataset, size, parameters

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._dataset)
        while samples := list(islice(rows, self._size)):
            yield batch_of_rows(samples, self._parameters)


class RayBatches:
    """The batches of a Ray data set in order, which Ray keeps only on request."""

    def __init__(self, dataset: Any, size: int, parameters: Parameters) -> None:
        self._dataset, self._size, self._parameters = dataset, size, parameters

    def __iter__(self) -> Generator[Any, None, None]:
        options = self._dataset.context.execution_options
        before, options.preserve_order = options.preserve_order, True
        try:
            for columns in self._dataset.iter_batches(batch_size=self._size, batch_format="numpy"):
                yield batch_of_columns(columns, self._parameters)
        finally:
            options.preserve_order = before


def _formatted(dataset: Any, parameters: Parameters) -> Any:
    """A Hugging Face data set that reads only the columns we need, as numpy; one with a format is left as it is."""
    if dataset.format["type"] is not None:
        return dataset
    if parameters.to_inputs is not None:
        return dataset.with_format("numpy")
    named = [name for name in dataset.column_names if name in parameters.names]
    kept = [name for name in dataset.column_names if name in parameters.keep and name not in named]
    return (dataset.select_columns(named + kept) if named else dataset).with_format("numpy")


def _fitted(batch: Any, parameters: Parameters) -> Any:
    """A batch on the host, with the entries that the model takes."""
    return _on_host(parameters.fitted(batch))


def _on_host(data: Any) -> Any:
    return mapped(lambda tensor: tensor.detach().cpu(), data)


def _is(value: Any, module: str, name: str) -> bool:
    """Whether `value` is an instance of a class of an optional library, without importing it."""
    return any(kind.__module__ == module and kind.__name__ == name for kind in type(value).__mro__)


def _samples(dataset: Any) -> int:
    if not isinstance(dataset, Sized):
        raise TypeError(f"data: a {type(dataset).__name__} with __getitem__ also needs __len__")
    return len(dataset)


def _numbers(start: int, stop: int | None, batches: int) -> range:
    return range(start, batches if stop is None else min(stop, batches))
