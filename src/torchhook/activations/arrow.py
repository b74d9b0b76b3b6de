"""Rows as an Arrow table, for pandas, polars, DuckDB and parquet: the table's memory is the map of the files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from torchhook.activations.manifest import Kind
from torchhook.activations.mapped import Stretch
from torchhook.core.errors import HarvestError

_KEYS = ("sample", "position")
_NAMES = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "uint8",
}


def table_of(keys: tuple[Tensor, Tensor], columns: Mapping[str, Sequence[Stretch]], kinds: Mapping[str, Kind]) -> Any:
    """A table of columns with the same rows, and their `keys`; a chunk a shard."""
    arrow = _pyarrow()
    clash = [site for site in columns if site in _KEYS]
    if clash:
        raise HarvestError(f"the site {clash[0]!r} has the name of a column of every table; leave it out")
    fields = [(arrow.field(name, arrow.int64()), _plain(values)) for name, values in zip(_KEYS, keys, strict=True)]
    fields += [_site(site, parts, kinds[site]) for site, parts in columns.items()]
    return arrow.table([values for _, values in fields], schema=arrow.schema([field for field, _ in fields]))


def _site(site: str, parts: Sequence[Stretch], kind: Kind) -> tuple[Any, Any]:
    arrow = _pyarrow()
    chunks = [_rows(part.span(0, part.rows)) for part in parts if part.rows]
    as_type = _rows(torch.empty(0, *kind.shape, dtype=kind.torch_dtype)).type
    return arrow.field(site, as_type, metadata={"shape": json.dumps(kind.shape)}), arrow.chunked_array(chunks, as_type)


def _rows(rows: Tensor) -> Any:
    """Rows of numbers as a list each; rows that are one number as they are."""
    arrow, values = _pyarrow(), _plain(rows.flatten())
    if rows.dim() == 1:
        return values
    kind = arrow.list_(values.type, math.prod(rows.shape[1:]))
    return arrow.Array.from_buffers(kind, len(rows), [None], children=[values])


def _plain(values: Tensor) -> Any:
    """Numbers where they lie; Arrow has no bfloat16, and packs truth values into bits."""
    arrow = _pyarrow()
    if values.dtype == torch.bfloat16:
        values = values.float()
    memory = arrow.foreign_buffer(values.data_ptr(), values.nbytes, base=values)
    found = arrow.Array.from_buffers(getattr(arrow, _NAMES[values.dtype])(), len(values), [None, memory])
    return found.cast(arrow.bool_()) if values.dtype == torch.bool else found


def _pyarrow() -> Any:
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ImportError('to_arrow() needs pyarrow: pip install "torchhook[parquet]"') from error
