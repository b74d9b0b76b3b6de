"""What a site gives for a batch, as rows: one a sample, or one a token, flat and without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from torchhook.activations.batch_columns import PADDING
from torchhook.core.batch import Batch
from torchhook.core.errors import HarvestError
from torchhook.core.text import shape_of
from torchhook.core.trees import leaves
from torchhook.stats.stat import counted

RowsName = Literal["auto", "sample", "token"]
"""What a row is: a token where the batch has some, else a sample; or always one of them."""

_WHOLE = (torch.int64, torch.int32)


class Tokens(NamedTuple):
    """Which positions of a batch are tokens, and not padding."""

    width: int | None  # how many positions a sample has; None: as many as the site gives
    lengths: list[int]  # tokens of each sample; empty if all positions are
    places: Tensor | None  # of the tokens among all positions, on the device of the model; None if all are


class Positions(NamedTuple):
    """The tokens of a batch, and those of what is decoded, in a model that reads one text and writes another."""

    read: Tokens | None
    decoded: Tokens | None = None
    deep: bool = False  # whether rows may have several dimensions: a query by heads, but also a matrix by channels


class Rows(NamedTuple):
    """The rows of a batch at a site."""

    values: Tensor
    lengths: list[int] | None  # how many of them each sample has; None: one


def positions_of(batch: Batch, samples: int, rows: RowsName, device: torch.device | None) -> Positions | None:
    """The tokens of a batch, by its attention masks or else by its first argument that is a table of whole numbers.

    >>> positions_of(Batch.of({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}), 2, "auto", None).read
    Tokens(width=3, lengths=[2, 3], places=tensor([0, 1, 3, 4, 5]))
    """
    if rows == "sample":
        return None
    entries = batch.arguments.kwargs
    mask = _table(entries.get("attention_mask", entries.get(PADDING)), samples)
    other = _table(entries.get("decoder_attention_mask"), samples)
    written = _table(entries.get("decoder_input_ids"), samples)
    tables = (_table(leaf, samples) for _, leaf in leaves(batch.arguments) if leaf.dtype in _WHOLE)
    ids = next((table for table in tables if table is not None), None)
    read = _masked(mask, device) or _whole(ids) or (Tokens(None, [], None) if rows == "token" else None)
    decoded = _masked(other, device) or _whole(written)
    return None if read is None else Positions(read, decoded, rows == "token")


def _table(entry: Any, samples: int) -> Tensor | None:
    return entry if isinstance(entry, Tensor) and entry.dim() == 2 and len(entry) == samples else None


def _masked(mask: Tensor | None, device: torch.device | None) -> Tokens | None:
    if mask is None:
        return None
    valid = mask.cpu() != 0
    places = None if bool(valid.all()) else valid.flatten().nonzero().flatten().to(device)
    return Tokens(mask.shape[1], valid.sum(1).tolist(), places)


def _whole(ids: Tensor | None) -> Tokens | None:
    return None if ids is None else Tokens(ids.shape[1], [], None)


def rows_of(value: Any, samples: int, positions: Positions | None, site: str, *, kept: bool = False) -> Rows:
    """The rows in what a site gave for a batch of so many samples; or in an entry of the batch that is `kept`.

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
    for tokens in _candidates(positions, x, samples, site, kept):
        flat = x if x.shape[0] != samples else x.flatten(0, 1)
        lengths = tokens.lengths or [len(flat) // samples] * samples
        return Rows(flat if tokens.places is None else flat.index_select(0, tokens.places.to(x.device)), lengths)
    if not x.dim() or len(x) != samples:
        raise HarvestError(
            f"{site!r} gave {shape_of(x)} for a batch of {samples}, which is not a row a sample; transform= makes rows,"
            " or a list with a tensor for each sample"
        )
    return Rows(x, None)


def _candidates(positions: Positions | None, x: Tensor, samples: int, site: str, kept: bool) -> list[Tokens]:
    """The tokens whose rows `x` has, if any: one, or it cannot be told which."""
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
        f"{site!r} gave {shape_of(x)}, and both attention masks of the batch fit: which are its tokens? Let transform="
        " return a list with a tensor for each sample, or pass rows='sample'"
    )


def _same(a: Tokens, b: Tokens) -> bool:
    if a.places is None or b.places is None:
        return a.places is b.places
    return torch.equal(a.places, b.places)


def _fits(x: Tensor, samples: int, tokens: Tokens, deep: bool, kept: bool) -> bool:
    """Whether `x` has a row for each position."""
    if kept:
        return x.dim() == 2 and not x.is_floating_point() and x.shape == (samples, tokens.width)
    if x.dim() > 2 and len(x) == samples:
        return (deep or x.dim() == 3) and tokens.width in (None, x.shape[1])
    return x.dim() > 1 and tokens.width is not None and len(x) == samples * tokens.width != samples


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


def chosen(value: Any) -> Any:
    """Of what a module returns, the tensor that is meant: the first of real numbers, else the first."""
    if isinstance(value, Tensor):
        return value
    found = [leaf for _, leaf in leaves(value)]
    return next((leaf for leaf in found if leaf.is_floating_point()), found[0] if found else value)
