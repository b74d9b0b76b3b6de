"""Fingerprints of a model and of data, which change if anything in them changes.

The bits of a model's tensors are summed as integers on their own device. Integer sums do not depend on rounding or
order, so the same weights have the same fingerprint everywhere, and only two numbers per tensor go to the host.
"""

from __future__ import annotations

import ctypes
import re
import zlib
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchhook.activations.sources import ReadBatch, Source
from torchhook.core.selection import walk
from torchhook.core.shards import local
from torchhook.core.torch_internals import own_buffers, own_parameters
from torchhook.core.trees import leaves

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PAGE = 1 << 15  # words summed at a time: few enough for the cache of a core
_PAGES = 128  # pages at a time on an accelerator
_ODD = -7046029254386353131  # 2**64 / golden ratio, as in Fibonacci hashing: its multiples are far apart
_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def model_fingerprint(model: nn.Module) -> str:
    """The fingerprint of a model: names, classes and settings of its modules, names, dtypes and values of its tensors.

    Its device, wrappers, hooks, compilation and training mode do not matter. Of a sharded tensor the local part
    counts.

    >>> model = nn.Linear(2, 2)
    >>> before = model_fingerprint(model)
    >>> model_fingerprint(model.eval()) == before
    True
    >>> _ = model.weight.data[0, 0].add_(1)
    >>> model_fingerprint(model) == before
    False
    """
    lines: list[str] = []
    sums: list[Tensor] = []
    seen: dict[int, tuple[str, Tensor]] = {}  # by id; holds the tensors, so that no id is used twice
    for path, module in walk(model):
        lines.append(f"{path!r} {type(module).__qualname__} {_settings(module)}")
        for name, tensor in (*own_parameters(module).items(), *own_buffers(module).items()):
            if tensor is None:
                continue
            known, _ = seen.get(id(tensor), (None, None))
            lines.append(f"{path!r} {name!r} {known!r} {tensor.dtype} {_shape(tensor)}")
            if known is None:
                seen[id(tensor)] = f"{path}.{name}", tensor
                sums += [one for part in _parts(tensor) for one in _sums(part)]
    return _digest(*lines, *_fetched(sums))


def _settings(module: nn.Module) -> str:
    """The settings in a module's repr, such as an epsilon, without memory addresses, which differ between runs."""
    try:
        return _ADDRESS.sub("", module.extra_repr())
    except Exception:  # a custom extra_repr that raises is not our concern
        return ""


def batch_fingerprint(data: Any) -> int:
    """The fingerprint of a batch: its tensors, numbers and strings, and how they are nested.

    >>> batch_fingerprint({"x": torch.ones(2)}) == batch_fingerprint({"x": torch.ones(2)})
    True
    >>> batch_fingerprint({"x": torch.ones(2)}) == batch_fingerprint({"y": torch.ones(2)})
    False
    """
    found = 0
    for piece in _pieces(data):
        found = zlib.crc32(piece, found)
    return found


def data_fingerprint(source: Source) -> str:
    """The fingerprint of data: their kind, their number, the first batch, and the last one if reading it is cheap.

    Data that differ each time are not read.

    >>> from torchhook.activations.sources import source_of
    >>> model = nn.Linear(2, 2)
    >>> zeros, ones = (source_of(make(100, 2), None, model) for make in (torch.zeros, torch.ones))
    >>> data_fingerprint(zeros) == data_fingerprint(ones)
    False
    """
    facts: list[Any] = [source.kind, source.samples]
    if source.repeats:
        facts += map(_batch_facts, source.read(0, 1, skip=True))
        if source.indexed and source.batches:
            facts += map(_batch_facts, source.read(source.batches - 1, skip=True))
    return _digest(*facts)


def _batch_facts(read: ReadBatch) -> tuple[int, list[int], int]:
    return read.number, list(read.ids), batch_fingerprint(read.data)


def _digest(*facts: Any) -> str:
    return blake2b("\n".join(map(str, facts)).encode(), digest_size=16).hexdigest()


def _shape(tensor: Tensor) -> str:
    return "lazy" if is_lazy(tensor) else "nested" if tensor.is_nested else str(tuple(tensor.shape))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of; none if it has no values."""
    if is_lazy(tensor) or tensor.is_meta:
        return
    tensor = local(tensor.detach())
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif tensor.is_nested:
        for one in tensor.unbind():
            yield from _parts(one)
    elif tensor.is_quantized:
        yield tensor.int_repr()
        yield from _scales(tensor)
    elif tensor.layout is torch.sparse_coo:
        ordered = tensor.coalesce()
        yield from (ordered.indices(), ordered.values())
    elif tensor.layout in _COMPRESSED:
        yield from (part(tensor) for part in _COMPRESSED[tensor.layout])
    else:
        plain = tensor if tensor.layout is torch.strided else tensor.to_dense()
        yield plain.resolve_conj().resolve_neg()


def _scales(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        yield torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64, device=tensor.device)
    else:
        yield from (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points())


def _fetched(sums: list[Tensor]) -> list[int]:
    """Scalars as Python numbers, with one copy per device."""
    by_device: dict[torch.device, list[int]] = {}
    for position, one in enumerate(sums):
        by_device.setdefault(one.device, []).append(position)
    found: dict[int, int] = {}
    for positions in by_device.values():
        found.update(zip(positions, torch.stack([sums[one] for one in positions]).tolist(), strict=True))
    return [found[position] for position in range(len(sums))]


def _bytes(part: Tensor) -> Tensor:
    return part.contiguous().view(-1).view(torch.uint8)


def _sums(part: Tensor) -> list[Tensor]:
    """Two sums over the bits of a tensor, on its device: one of its 8-byte words, one of the remaining bytes."""
    flat = _bytes(part)
    whole = len(flat) // 8 * 8
    if flat.storage_offset() % 8:  # a view that is not aligned to words
        flat = flat.clone()
    return [_sum(flat[:whole].view(torch.int64)), _sum(flat[whole:].long())]


def _sum(words: Tensor) -> Tensor:
    """A sum that depends on the value and the position of each word: page by page, then over the sums of the pages."""
    salts = torch.arange(_PAGE, device=words.device) * _ODD
    whole = len(words) // _PAGE
    pages, rest = words[: whole * _PAGE].view(whole, _PAGE), words[whole * _PAGE :]
    step = 1 if words.device.type == "cpu" else _PAGES
    sums = [_page_sums(pages[page : page + step], salts) for page in range(0, whole, step)]
    found = torch.cat([*sums, _page_sums(rest[None], salts[: len(rest)])])
    return found[0] if len(found) == 1 else _sum(found)


def _page_sums(pages: Tensor, salts: Tensor) -> Tensor:
    # hash each word before adding: otherwise two flipped signs would cancel out
    mixed = (pages ^ salts).mul_(_ODD)
    mixed ^= mixed >> 29
    return mixed.sum(1)


def _pieces(data: Any) -> Iterator[Any]:
    """The content of a batch, as bytes."""
    if isinstance(data, Tensor):
        yield f"{data.dtype} {_shape(data)}".encode()
        for part in _parts(data):
            flat = _bytes(part.cpu())
            yield (ctypes.c_char * len(flat)).from_address(flat.data_ptr()) if len(flat) else b""
    elif isinstance(data, Mapping):
        yield f"{{{len(data)}".encode()
        for key, item in data.items():
            yield repr(key).encode()
            yield from _pieces(item)
    elif isinstance(data, (list, tuple)):
        yield f"[{len(data)}".encode()
        for item in data:
            yield from _pieces(item)
    elif data is None or isinstance(data, (bool, int, float, complex, str, bytes)):
        yield repr(data).encode()
    else:  # its repr may contain a memory address
        yield type(data).__qualname__.encode()
        for address, tensor in leaves(data):
            yield repr(address).encode()
            yield from _pieces(tensor)
