"""Samples and columns of a data set as a batch for a model, without failing on a single bad sample."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from torchhook.core.batch import Keywords, ToInputs
from torchhook.core.errors import HarvestError
from torchhook.core.text import shape_of

_MASK = "attention_mask"
PADDING = "attention mask"  # an entry, never an argument: marks padding for a model that takes no mask
_MASKS = (_MASK, f"decoder_{_MASK}", PADDING)
_LABELS = ("label", "labels", "target", "targets")
_SKIP = "pass on_error='skip' to leave such samples out"
_ANCHORS = 4  # how many samples the others are collated with, to find the ones that do not fit


class Parameters(NamedTuple):
    """The named parameters of a model's forward, the entries of a batch to keep beside them, and how to get there."""

    names: tuple[str, ...]
    others: bool  # whether forward also takes **kwargs
    keep: tuple[str, ...] = ()
    to_inputs: ToInputs | None = None  # turns a batch into what the model takes

    @staticmethod
    def of(model: nn.Module, keep: Iterable[str] = (), to_inputs: ToInputs | None = None) -> Parameters:
        """The parameters of a model, wrapped or not.

        >>> Parameters.of(nn.Linear(2, 2), keep=["label"])
        Parameters(names=('input',), others=False, keep=('label',), to_inputs=None)
        """
        return Parameters(*Keywords.of(model), tuple(keep), to_inputs)

    def takes(self, name: str) -> bool:
        """Whether the model can be called with an argument of this name."""
        return self.others or name in self.names

    def means(self, name: str) -> bool:
        """Whether forward names this parameter, or has only **kwargs."""
        return name in self.names if self.names else self.others

    def fitted(self, batch: Any) -> Any:
        """What the model takes of a batch, and what to keep of it."""
        if self.to_inputs is not None:
            batch = self.to_inputs(batch)
        return self.chosen(batch) if isinstance(batch, Mapping) else batch

    def chosen(self, entries: Mapping[str, Any], there: Iterable[str] | None = None) -> Any:
        """The entries of a batch that the model takes, those to keep, and the masks, which mark padding.

        If the names of no entries match, the only tensor that is not a label becomes the first argument.

        >>> Parameters.of(nn.Linear(2, 2)).chosen({"image": torch.ones(1, 2), "name": ["a"]})
        {'input': tensor([[1., 1.]])}
        """
        kept = {name: entry for name, entry in entries.items() if name in self.keep or name in _MASKS}
        if any(self.takes(name) for name in entries):
            return {name: entry for name, entry in entries.items() if self.takes(name)} | kept
        lone = [x for name, x in entries.items() if isinstance(x, Tensor) and name not in kept and name not in _LABELS]
        if len(lone) != 1 or (kept and not self.names):
            raise HarvestError(
                f"no tensor of data fits the model: data has {_listed(entries if there is None else there)}, and the"
                f" model's forward takes {_listed(self.names)}; pass batch_to_inputs=, a function that turns a batch"
                " into inputs"
            )
        return {self.names[0]: lone[0], **kept} if self.names else lone[0]


class Stacked(NamedTuple):
    """A column as a tensor with one row per sample."""

    values: Tensor
    lengths: list[int] | None  # of each sample, if samples are lists of numbers


def batch_of_rows(rows: Sequence[Mapping[str, Any]], parameters: Parameters) -> Any:
    """A batch for the model, of samples that are mappings."""
    return batch_of_columns({name: [row[name] for row in rows] for name in rows[0]}, parameters)


def batch_of_columns(columns: Mapping[str, Any], parameters: Parameters) -> Any:
    """A batch for the model, of columns with one value per sample.

    Lists of numbers are padded with zeros to the longest, and the attention mask says which values are real. Equally
    long lists get a mask, too: whether there is one must not depend on which samples share a batch.

    >>> parameters = Parameters(("input_ids", "attention_mask"), False)
    >>> batch_of_columns({"input_ids": [[5, 6, 7], [8]], "text": ["a b c", "d"]}, parameters)
    {'input_ids': tensor([[5, 6, 7],
            [8, 0, 0]]), 'attention_mask': tensor([[1, 1, 1],
            [1, 0, 0]])}
    """
    named = [name for name in parameters.names if name in columns and parameters.to_inputs is None]
    wanted = [*named, *(name for name in (*parameters.keep, *_MASKS) if name in columns and name not in named)]
    found: dict[str, Stacked] = {}
    for name in wanted if named else columns:
        column = stacked(columns[name], name)
        if column is not None:
            found[name] = column
    entries = {name: column.values for name, column in found.items()}
    lists = next((column for column in found.values() if column.lengths is not None), None)
    name = _MASK if parameters.means(_MASK) else PADDING
    if lists is not None and _MASK not in columns and (name == _MASK or not lists.values.is_floating_point()):
        positions = torch.arange(max(lists.lengths or [0]))
        entries[name] = (positions < torch.tensor(lists.lengths)[:, None]).long()
    return entries if parameters.to_inputs is not None else parameters.chosen(entries, columns)


def stacked(values: Any, name: str) -> Stacked | None:
    """The values of a column, one per sample, as one tensor; None if they are not numbers.

    >>> stacked([[1, 2], [3]], "x"), stacked(["a"], "x")
    (Stacked(values=tensor([[1, 2],
            [3, 0]]), lengths=[2, 1]), None)
    """
    whole = None if isinstance(values, list) else tensor_of(values)
    if whole is not None:
        return Stacked(whole, [whole.shape[1]] * len(whole) if whole.dim() == 2 else None)
    parts = [part for part in map(tensor_of, values) if part is not None]
    if not parts:
        return None
    if len(parts) < len(values):
        raise ValueError(f"column {name!r} has numbers for {len(parts)} of {len(values)} samples")
    dtype = next((part.dtype for part in parts if part.numel()), parts[0].dtype)  # an empty list has no dtype
    lists = all(part.dim() == 1 for part in parts)
    if not lists and len({part.shape for part in parts}) > 1:
        shapes = ", ".join(dict.fromkeys(map(shape_of, parts)))
        raise ValueError(f"column {name!r} has samples of different shapes, which cannot be stacked: {shapes}")
    parts = [part.to(dtype) for part in parts]
    if lists:
        return Stacked(pad_sequence(parts, batch_first=True), [len(part) for part in parts])
    return Stacked(torch.stack(parts), None)


def tensor_of(value: Any) -> Tensor | None:
    """A value of a data set as a tensor: integers as int64, floats in the default dtype; None if not numeric.

    >>> tensor_of(2.5), tensor_of([1, 2]), tensor_of("text")
    (tensor(2.5000), tensor([1, 2]), None)
    """
    if isinstance(value, Tensor):
        return value
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.kind not in "biuf":
            return None
        long = value.dtype.kind in "iu" and value.dtype.itemsize > 1  # single bytes are images
        return _usual(torch.tensor(value.astype(numpy.int64) if long else value))
    if not isinstance(value, (bool, int, float, list, tuple)):
        return None
    try:
        return _usual(torch.tensor(value))
    except (TypeError, ValueError):  # a list of non-numbers, or of lists of different lengths
        return None


def _usual(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.dtype == torch.float64 else tensor


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


class LoadedSample(NamedTuple):
    """A sample as it was read, or the reason why it could not be read."""

    number: int
    value: Any
    reason: str | None = None


class Collated(NamedTuple):
    """The collated samples, and the reasons for those left out."""

    batch: Any
    unread: dict[int, str]


class FaultTolerantDataset:
    """A data set in which one sample may fail without the others.

    To a DataLoader's workers it looks like the data set itself: `worker_init_fn` reads and writes its attributes.
    """

    __slots__ = ("_dataset", "_skip")

    def __init__(self, dataset: Any, skip: bool) -> None:
        object.__setattr__(self, "_dataset", dataset)
        object.__setattr__(self, "_skip", skip)

    def __getitems__(self, indices: list[int]) -> list[LoadedSample]:
        if hasattr(self._dataset, "__getitems__"):
            with suppress(Exception):  # then read one by one, to find the sample that fails
                values = self._dataset.__getitems__(indices)
                return [LoadedSample(index, value) for index, value in zip(indices, values, strict=True)]
        return [self._one(index) for index in indices]

    def _one(self, index: int) -> LoadedSample:
        try:
            return LoadedSample(index, self._dataset[index])
        except Exception as error:
            if not self._skip:
                raise HarvestError(f"cannot read sample {index} of data: {error_text(error)}; {_SKIP}") from error
            return LoadedSample(index, None, _reason(error))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __reduce__(self) -> tuple[type[FaultTolerantDataset], tuple[Any, bool]]:
        return FaultTolerantDataset, (self._dataset, self._skip)


def collated(collate: Callable[[list[Any]], Any], skip: bool, samples: list[LoadedSample]) -> Collated:
    """A batch of the samples that were read, without those that cannot be collated."""
    unread = {sample.number: sample.reason for sample in samples if sample.reason is not None}
    good = [sample for sample in samples if sample.reason is None]
    try:
        return Collated(collate([sample.value for sample in good]) if good else None, unread)
    except HarvestError:
        raise
    except Exception as error:
        if not skip:
            which = f"samples {good[0].number} to {good[-1].number} of data"
            raise HarvestError(f"cannot collate {which}: {error_text(error)}; {_SKIP}") from error
        return _collated_without(collate, good, unread)


def _collated_without(
    collate: Callable[[list[Any]], Any], samples: list[LoadedSample], unread: dict[int, str]
) -> Collated:
    """The samples that fit together, if they are at least half of all; else none."""
    for anchor in samples[:_ANCHORS]:
        reasons = {sample.number: _failing(collate, [anchor, sample]) for sample in samples}
        good = [sample for sample in samples if reasons[sample.number] is None]
        if 2 * len(good) >= len(samples) and _failing(collate, good) is None:
            odd = {number: reason for number, reason in reasons.items() if reason is not None}
            return Collated(collate([sample.value for sample in good]), unread | odd)
    reason = str(_failing(collate, samples))
    return Collated(None, unread | {sample.number: reason for sample in samples})


def _failing(collate: Callable[[list[Any]], Any], samples: list[LoadedSample]) -> str | None:
    """Why samples cannot be collated; None if they can."""
    try:
        collate([sample.value for sample in samples])
        return None
    except Exception as error:
        return _reason(error)


def error_text(error: Exception) -> str:
    """The type and the message of an error.

    >>> error_text(ValueError("too long"))
    'ValueError: too long'
    """
    return f"{type(error).__name__}: {error}"


def _reason(error: Exception) -> str:
    return error_text(error).splitlines()[0]
