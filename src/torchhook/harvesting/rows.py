"""What a site gives for a batch, as rows: one a sample, or one a token, flat and without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchhook.calling import Batch
from torchhook.core.trees import leaves
from torchhook.errors import HarvestError
from torchhook.stats.stat import counted
from torchhook.text import shape_of

RowsName = Literal["auto", "sample", "token"]
"""What a row is: a token where the batch has some, else a sample; or always one of them."""

_WHOLE = (torch.int64, torch.int32)


class Tokens(NamedTuple):
    """Which positions of a batch are tokens, and not padding."""

    width: int | None  # how many positions a sample has; None: as many as the site gives
    lengths: list[int]  # tokens of each sample; empty if all positions are
    places: Tensor | None  # of the tokens among all positions, on the device of the model; None if all are


class Rows(NamedTuple):
    """The rows of a batch at a site."""

    values: Tensor
    lengths: list[int] | None  # how many of them each sample has; None: one


def tokens_of(batch: Batch, samples: int, rows: RowsName, device: torch.device | None) -> Tokens | None:
    """The tokens of a batch, by its attention mask or else by its first argument that is a table of whole numbers.

    >>> tokens_of(Batch.of({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}), 2, "auto", None)
    Tokens(width=3, lengths=[2, 3], places=tensor([0, 1, 3, 4, 5]))
    """
    if rows == "sample":
        return None
    mask = batch.arguments.kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and len(mask) == samples:
        valid = mask.cpu() != 0
        places = None if bool(valid.all()) else valid.flatten().nonzero().flatten().to(device)
        return Tokens(mask.shape[1], valid.sum(1).tolist(), places)
    tables = (leaf for _, leaf in leaves(batch.arguments) if leaf.dim() == 2 and leaf.dtype in _WHOLE)
    ids = next((table for table in tables if len(table) == samples), None)
    if ids is not None:
        return Tokens(ids.shape[1], [], None)
    return Tokens(None, [], None) if rows == "token" else None


def rows_of(value: Any, samples: int, tokens: Tokens | None, site: str, *, numbers: bool = False) -> Rows:
    """The rows in what a site gave for a batch of so many samples; a row a token may be `numbers` alone, as ids are.

    A list or a nested tensor with a tensor for each sample, as a transform may make it, has as many rows for each as
    that is long.

    >>> rows_of([torch.ones(2, 4), torch.ones(1, 4)], 2, None, "fc").lengths
    [2, 1]
    """
    if isinstance(value, Tensor) and value.is_nested:
        value = list(value.unbind())
    if isinstance(value, (list, tuple)):
        return _of_list(value, samples, site)
    if not isinstance(value, Tensor):
        raise HarvestError(f"{site!r} gave a {type(value).__name__} and not a tensor; transform= makes one of it")
    x = _plain(value, site)
    if tokens is not None:
        flat = _flat(x, samples, tokens.width, 1 if numbers else 2)
        if flat is not None:
            lengths = tokens.lengths or [len(flat) // samples] * samples
            return Rows(flat if tokens.places is None else flat.index_select(0, tokens.places.to(x.device)), lengths)
    if not x.dim() or len(x) != samples:
        raise HarvestError(
            f"{site!r} gave {shape_of(x)} for a batch of {samples}, which is not a row a sample; transform= makes rows,"
            " or a list with a tensor for each sample"
        )
    return Rows(x, None)


def _of_list(parts: Sequence[Any], samples: int, site: str) -> Rows:
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim()]
    if len(parts) != samples or len(tensors) != samples:
        raise HarvestError(
            f"{site!r} gave a list of {len(tensors)} tensors for a batch of {samples}; a list has one a sample"
        )
    return Rows(torch.cat([_plain(part, site) for part in tensors]), [len(part) for part in tensors])


def _plain(x: Tensor, site: str) -> Tensor:
    """The numbers of a tensor of any kind, in its shape."""
    if x.is_complex():
        raise HarvestError(
            f"{site!r} gave complex numbers, which cannot be stored; transform=torch.view_as_real does it"
        )
    return counted(x)


def _flat(x: Tensor, samples: int, width: int | None, least: int) -> Tensor | None:
    """A row a position, or None if `x` is of samples as a whole."""
    if x.dim() > least and len(x) == samples and (width is None or x.shape[1] == width):
        return x.flatten(0, 1)
    flattened = width is not None and width > 1 and x.dim() > 1 and len(x) == samples * width
    return x if flattened else None


def chosen(value: Any) -> Any:
    """Of what a module returns, the tensor that is meant: the first of real numbers, else the first."""
    if isinstance(value, Tensor):
        return value
    found = [leaf for _, leaf in leaves(value)]
    return next((leaf for leaf in found if leaf.is_floating_point()), found[0] if found else value)
