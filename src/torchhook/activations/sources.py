"""Data of any kind as numbered batches, to be read from any of them on.

A batch has the same number and the same samples whenever it is read: that is what lets a harvest go on where it was
left, and workers share it. A sample is known by its index in the data set, or, where there is none, by its place in
the stream.
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
from torchhook.core.batch import Batch, batch_count, samples_of
from torchhook.core.errors import HarvestError
from torchhook.core.tap import require_count
from torchhook.core.trees import mapped

_SIZE = 32  # samples in a batch, unless `batch_size` says otherwise
_ONCE = "it can be read once; make it a list, or a class with __iter__, or pass resume=False"
_SHUFFLED = "its order is drawn anew each time; pass shuffle=False to the DataLoader, or resume=False"
_UNORDERED = "its batches come as they get ready; pass in_order=True to the DataLoader, or resume=False"


class ReadBatch(NamedTuple):
    """One batch as it was read."""

    number: int
    ids: Sequence[int]  # of the samples in `data`, in their order
    data: Any  # what `Batch.of` understands, on the host; None if nothing could be read
    unread: dict[int, str]  # the samples that could not be read, and why


class Source(ABC):
    """Numbered batches of samples."""

    kind: str  # part of the fingerprint in every manifest: stores of today stop to resume if it changes
    samples: int | None = None  # how many, if that is known
    batches: int | None = None
    repeats: bool = True  # whether reading again gives the same batches in the same order
    indexed: bool = False  # whether a batch can be read without reading those before
    why_not: str = ""  # it does not repeat, and what to do about it

    @abstractmethod
    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        """The batches from `start` up to `stop`; with `skip`, samples that cannot be read are left out and told."""


def source_of(data: Any, batch_size: int | None, model: nn.Module, keep: Iterable[str] = ()) -> Source:
    """Whatever `data` is, as a source of batches that `model` can be given, and with the entries that `keep` names.

    >>> import torch
    >>> source = source_of(torch.arange(10.0).view(5, 2), 2, nn.Linear(2, 1))
    >>> source.samples, source.batches
    (5, 3)
    >>> [(read.number, list(read.ids)) for read in source.read(1)]
    [(1, [2, 3]), (2, [4])]
    """
    if batch_size is not None:
        require_count(batch_size, "batch_size")
    parameters, size = Parameters.of(model, keep), batch_size or _SIZE
    in_samples = _of_samples(data, size, parameters)
    if in_samples is not None:
        return in_samples
    if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
        raise TypeError(
            f"data must be a DataLoader, an iterable of batches, a data set or a tensor of samples, and it is a"
            f" {type(data).__name__}; put the one batch you have into a list, or choose one split of several"
        )
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size} is for data that come in samples, and a {type(data).__name__} gives batches;"
            " leave batch_size out"
        )
    return _of_loader(data, parameters) if isinstance(data, DataLoader) else _of_batches(data, parameters)


class TensorSource(Source):
    """A tensor or an array whose rows are samples."""

    kind = "Rows"
    indexed = True

    def __init__(self, rows: Any, size: int) -> None:
        if not rows.ndim or tensor_of(rows[:0]) is None:
            raise TypeError("data: a tensor or an array must have numbers, and a dimension for samples")
        self._rows, self._plan = rows, Consecutive(len(rows), size)
        self.samples, self.batches = len(rows), len(self._plan)

    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        for number in _numbers(start, stop, len(self._plan)):
            ids = self._plan[number]
            yield ReadBatch(number, ids, _home(tensor_of(self._rows[ids.start : ids.stop])), {})


class IndexedSource(Source):
    """A data set with indices, read by a DataLoader of our own over a plan of batches."""

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
            FaultTolerantDataset(self._dataset, skip),  # type: ignore[arg-type]  # reads several at once
            batch_sampler=(list(self._plan[number]) for number in numbers),
            collate_fn=partial(collated, self._collate, skip),
            **self._options,
        )
        for number, found in _watched(loader, start):
            ids = [index for index in self._plan[number] if index not in found.unread]
            data = _fitted(found.batch, self._parameters) if ids else None
            yield ReadBatch(number, ids if found.unread else self._plan[number], data, found.unread)


class StreamSource(Source):
    """Batches as they come: to go on at one of them is to read those before once more."""

    kind = "Stream"

    def __init__(self, data: Iterable[Any], parameters: Parameters, why_not: str = "") -> None:
        self._data, self._parameters = data, parameters
        self._begun = False
        self.repeats, self.why_not = not why_not, why_not
        self.batches = None if isinstance(getattr(data, "dataset", None), IterableDataset) else batch_count(data)
        self.indexed = isinstance(data, (list, tuple))  # where those before cost nothing
        if self.indexed:
            self.samples = sum(len(read.ids) for read in self.read())

    def read(self, start: int = 0, stop: int | None = None, *, skip: bool = False) -> Generator[ReadBatch, None, None]:
        if self._begun and self.why_not == _ONCE:
            raise HarvestError(f"data was read before, and {_ONCE}")
        self._begun = True
        place = 0
        for number, batch in islice(_watched(self._data, 0), stop):
            try:
                data = _fitted(batch, self._parameters)
                ids = range(place, place + samples_of(Batch.of(data)).length)
            except ValueError as error:
                raise HarvestError(f"batch {number} of data: {error}") from error
            place = ids.stop
            if number >= start:
                yield ReadBatch(number, ids, data, {})


class Consecutive(Sequence[range]):
    """All samples in their order, so many in a batch: a plan that needs no list of them.

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


def _watched(batches: Iterable[Any], first: int) -> Iterator[tuple[int, Any]]:
    """Batches with their numbers; what stops them is told with the number of the batch."""
    iterator = None
    for number in count(first):
        try:
            iterator = iter(batches) if iterator is None else iterator
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            iterator = None
            if getattr(batches, "num_workers", 0):  # a trace would hold the workers, which then end ten seconds late
                error.__traceback__ = None
            if isinstance(error, HarvestError):
                raise
            raise HarvestError(
                f"batch {number} of data cannot be read: {error_text(error)}; what comes after it cannot be read either"
            ) from error
        yield number, batch


def _of_samples(data: Any, size: int, parameters: Parameters) -> Source | None:
    """Data that come in samples; None if they are something else."""
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
        if _is(data, "ray.data.dataset", "MaterializedDataset"):  # of others, counting may mean to make them
            source.samples = data.count()
            source.batches = len(Consecutive(source.samples, size))
        return source
    if isinstance(data, IterableDataset):
        return _of_loader(DataLoader(data, batch_size=size), parameters)
    if isinstance(data, Dataset) or (hasattr(data, "__getitem__") and not isinstance(data, (Iterable, Mapping))):
        return IndexedSource(data, Consecutive(_samples(data), size), default_collate, parameters)
    return None


def _of_loader(loader: DataLoader[Any], parameters: Parameters) -> Source:
    if type(loader).__iter__ is not DataLoader.__iter__:  # it does something of its own with its batches
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
    except TypeError:  # the data set is asked for something else than numbers
        return StreamSource(_again(loader), parameters, _why_not(loader))
    source = IndexedSource(loader.dataset, plan, loader.collate_fn, parameters, _options(loader))
    if plan != [list(map(index, batch)) for batch in sampler]:
        source.repeats, source.why_not = False, _SHUFFLED
    return source


def _of_batches(data: Iterable[Any], parameters: Parameters) -> Source:
    return StreamSource(data, parameters, _ONCE if isinstance(data, Iterator) else "")


def _again(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader of the same batches that may be read by two at once: workers that persist start anew for each."""
    if not loader.persistent_workers:
        return loader
    how = _options(loader)
    if not isinstance(loader.dataset, IterableDataset):
        how["sampler"] = loader.sampler
    return DataLoader(
        loader.dataset, loader.batch_size, drop_last=loader.drop_last, collate_fn=loader.collate_fn, **how
    )


def _why_not(loader: DataLoader[Any]) -> str:
    """Why a stream of batches is another one the next time, if it is."""
    if isinstance(loader.dataset, Iterator):
        return _ONCE
    if loader.num_workers > 1 and not loader.in_order:
        return _UNORDERED
    drawn = not isinstance(loader.dataset, IterableDataset) and type(loader.sampler) is not SequentialSampler
    return _SHUFFLED if drawn and list(loader.sampler) != list(loader.sampler) else ""


def _options(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a DataLoader works, for another one over other batches of the same data set."""
    names = ["num_workers", "pin_memory", "timeout", "worker_init_fn", "generator"]
    if loader.num_workers:
        names += ["prefetch_factor", "multiprocessing_context"]
    return {name: getattr(loader, name) for name in names}


class StreamedBatches:
    """A Hugging Face data set without indices, so many samples at a time."""

    def __init__(self, dataset: Any, size: int, parameters: Parameters) -> None:
        self._dataset, self._size, self._parameters = dataset, size, parameters

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self._dataset)
        while several := list(islice(rows, self._size)):
            yield batch_of_rows(several, self._parameters)


class RayBatches:
    """The batches of a Ray data set, in their order, which Ray does not keep unless it is told to."""

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
    """A Hugging Face data set that reads only what is wanted, and fast; with a format of its own it stays as it is."""
    if dataset.format["type"] is not None:
        return dataset
    named = [name for name in dataset.column_names if name in parameters.names]
    kept = [name for name in dataset.column_names if name in parameters.keep and name not in named]
    return (dataset.select_columns(named + kept) if named else dataset).with_format("numpy")


def _fitted(batch: Any, parameters: Parameters) -> Any:
    """A batch on the host, with what the model takes."""
    return _home(parameters.chosen(batch) if isinstance(batch, Mapping) else batch)


def _home(data: Any) -> Any:
    return mapped(lambda tensor: tensor.detach().cpu(), data)


def _is(value: Any, module: str, name: str) -> bool:
    """Whether `value` is of a class of a library that need not be there."""
    return any(kind.__module__ == module and kind.__name__ == name for kind in type(value).__mro__)


def _samples(dataset: Any) -> int:
    if not isinstance(dataset, Sized):
        raise TypeError(f"data: a {type(dataset).__name__} with indices must say how many it has: give it a __len__")
    return len(dataset)


def _numbers(start: int, stop: int | None, batches: int) -> range:
    return range(start, batches if stop is None else min(stop, batches))
