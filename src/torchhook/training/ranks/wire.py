"""A share as bytes and back, without pickle: facts, the layout of the numbers, and the numbers.

A layout is long and nearly always the same, so it is sent once per connection, and after that its digest alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

import torch
from torch import Tensor

from torchhook.training.ranks.share import Blocks, Cell, Share, Vote

_SIZES = struct.Struct("<II16s")  # of the facts and of the layout, and the digest of the layout
_MOST = 1 << 28  # numbers in one share
_LAYOUTS = 32  # that are remembered: some vary from step to step, as when a rank is missing


class Wire:
    """One end of a connection, which remembers the layouts that went over it."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}  # both ends forget the same

    def packed(self, share: Share) -> bytes:
        """The bytes of a share."""
        arrays: list[Tensor] = []
        numbers = {cell: number for number, cell in enumerate(share.places)}
        lists: list[list[Cell]] = []  # ranks of the same stage have tables of the same cells, which are written once
        lists += (cells for cells, _ in share.tables.values() if cells not in lists)
        layout = {
            "places": [[*cell, *known] for cell, known in share.places.items()],
            "done": _laid(share.done, arrays, numbers),
            "first": _laid(share.first, arrays, numbers),
            "squares": _laid(share.squares, arrays, numbers),
            "open": [
                [lead, rank, _laid(blocks, arrays, numbers)]
                for lead, members in share.open.items()
                for rank, blocks in members.items()
            ],
            "votes": [[*key, [[vote.ranks, vote.total] for vote in votes]] for key, votes in share.votes.items()],
            "tables": [[numbers[cell] for cell in cells] for cells in lists],
        }
        arrays += (table for _, table in share.tables.values())
        arrays.append(torch.tensor([vote.bits for votes in share.votes.values() for vote in votes], dtype=torch.int64))
        text = json.dumps(layout).encode()
        digest = hashlib.sha256(text).digest()[:16]
        losses = [[step, *known] for step, known in share.losses.items()]
        tables = [[rank, lists.index(cells), table.size(1)] for rank, (cells, table) in share.tables.items()]
        facts = json.dumps([share.step, list(share.facts.items()), losses, tables]).encode()
        sent = b"" if digest in self._known else text
        if sent:
            self._remember(digest, None)
        blob = b"".join(array.contiguous().numpy().tobytes() for array in arrays) if arrays else b""
        return _SIZES.pack(len(facts), len(sent), digest) + facts + sent + blob

    def unpacked(self, data: bytes) -> Share:
        """The share that the other end has packed. Raises ValueError if it is none."""
        try:
            size, length, digest = _SIZES.unpack_from(data)
            at = _SIZES.size + size
            facts = json.loads(data[_SIZES.size : at])
            if length:
                self._remember(digest, json.loads(data[at : at + length]))
            return _read(self._known[digest], _Numbers(data, at + length), *facts)
        except (struct.error, KeyError, TypeError, IndexError, RecursionError) as error:
            raise ValueError(f"not a share: {type(error).__name__}: {error}") from error

    def _remember(self, digest: bytes, layout: Any) -> None:
        self._known[digest] = layout
        if len(self._known) > _LAYOUTS:
            del self._known[next(iter(self._known))]


class _Numbers:
    """Takes tensors from bytes, one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = bytearray(data), at

    def take(self, dtype: torch.dtype, *shape: int) -> Tensor:
        count = math.prod(shape)
        if min((count, *shape), default=0) < 0 or count > _MOST:
            raise ValueError(f"not a share: it has a tensor of {count:,} numbers")
        if not count:
            return torch.zeros(shape, dtype=dtype)
        found = torch.frombuffer(self._data, dtype=dtype, count=count, offset=self._at)
        self._at += count * dtype.itemsize
        return found.clone().view(shape)


def _laid(blocks: Blocks, arrays: list[Tensor], numbers: dict[Cell, int]) -> list[Any]:
    """The layout of blocks, whose states are added to `arrays`: cells are named by the number of their place."""
    laid = []
    for (stat, shape), (cells, states) in blocks.items():
        arrays.append(states.double())
        laid.append([stat, shape, [_laid_cell(cell, numbers) for cell in cells]])
    return laid


def _laid_cell(cell: Cell, numbers: dict[Cell, int]) -> list[Any]:
    stage, path, port = cell
    port, mark, part = port.partition("#")
    return [numbers[stage, path, port], part] if mark else [numbers[stage, path, port]]


def _read(layout: Any, numbers: _Numbers, step: int, facts: Any, losses: Any, tables: Any) -> Share:
    places: dict[Cell, tuple[str, ...]] = {}
    for stage, path, port, *known in layout["places"]:
        places[int(stage), str(path), str(port)] = tuple(map(str, known))
    cells = list(places)
    share = Share(int(step), {int(rank): dict(known) for rank, known in facts}, places=places)
    share.losses = {int(at): (float(total), int(count)) for at, total, count in losses}
    share.done = _blocks(layout["done"], numbers, cells)
    share.first = _blocks(layout["first"], numbers, cells)
    share.squares = _blocks(layout["squares"], numbers, cells)
    for lead, rank, laid in layout["open"]:
        share.open.setdefault(int(lead), {})[int(rank)] = _blocks(laid, numbers, cells)
    lists = [[cells[at] for at in here] for here in layout["tables"]]
    for rank, number, width in tables:
        share.tables[int(rank)] = lists[number], numbers.take(torch.float32, len(lists[number]), width)
    keys = [(int(stage), str(path), str(port), str(part)) for stage, path, port, part, _ in layout["votes"]]
    bits = iter(numbers.take(torch.int64, sum(len(votes) for *_, votes in layout["votes"])).tolist())
    for key, (*_, votes) in zip(keys, layout["votes"], strict=True):
        share.votes[key] = [Vote(next(bits), tuple(map(int, ranks)), int(count)) for ranks, count in votes]
    return share


def _blocks(laid: Any, numbers: _Numbers, cells: list[Cell]) -> Blocks:
    blocks: Blocks = {}
    for stat, shape, here in laid:
        named = [_cell(cells[number], *part) for number, *part in here]
        blocks[str(stat), tuple(shape)] = named, numbers.take(torch.float64, len(named), *shape)
    return blocks


def _cell(cell: Cell, *part: str) -> Cell:
    stage, path, port = cell
    return (stage, path, f"{port}#{part[0]}") if part else cell
