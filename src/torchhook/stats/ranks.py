"""Merges what all ranks of a process group have measured, with at most three all-reduces of one tensor each.

The first checks whether all ranks have the same rows. Only if not, the second exchanges the lists of rows. The last
carries the states: additive ones are added up on the way, others come in one slot per rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from torchhook.core.errors import SessionError
from torchhook.stats import Moments, Stat
from torchhook.stats.reading import Place, Row, Snapshot, kept
from torchhook.stats.result import Stats


class Offer(NamedTuple):
    """What a rank has to merge at one place: statistics, class of the module, note, and shapes of the states."""

    names: list[str]
    label: str
    note: str
    shapes: dict[str, list[int]]


Offers = dict[Place, Offer]


def merge(stats: Stats | Snapshot, group: Any = None) -> Snapshot:
    """What all ranks of `group` (None: the default group) have measured together. Every rank has to call this.

    Ranks may have seen different places, or nothing at all. Without a process group, it is a plain snapshot.

    >>> from torch import nn
    >>> from torchhook import distributed, measure
    >>> model = nn.Sequential(nn.ReLU())
    >>> with measure(model) as stats:
    ...     _ = model(torch.ones(3))
    >>> distributed.merge(stats)["0"].count
    3
    """
    if not isinstance(stats, (Stats, Snapshot)):
        raise TypeError(f"stats must be what measure() returned or a snapshot of it, not {stats!r:.80}")
    snapshot = stats if isinstance(stats, Snapshot) else stats.snapshot()
    if not (dist.is_available() and dist.is_initialized()):
        return snapshot
    states = {place: reading.states() for place, reading in snapshot.items()}
    mine = {place: _offer(row, states[place]) for place, row in snapshot.rows.items()}
    offers = _exchanged(mine, [repr(stat) for stat in snapshot.stats], group)
    union = _union(offers)
    known: dict[str, Stat] = {stat.name: stat for stat in (Moments(), *snapshot.stats)}
    merged = _merged(union, offers, states, {stat.key: stat for stat in known.values()}, group)
    rows = {}
    for place, offer in union.items():
        readers: dict[str, list[Callable[[], Tensor]]]
        readers = {key: [partial(kept, state)] for key, state in merged.get(place, {}).items()}
        note = f"{offer.note}; of all {len(offers)} ranks"
        shape = snapshot.rows[place].shape if place in snapshot.rows else None
        rows[place] = Row(tuple(known[name] for name in offer.names), offer.label, note, readers, shape=shape)
    return Snapshot(rows, snapshot.aliases, snapshot.stats)


def _offer(row: Row, states: dict[str, Tensor]) -> Offer:
    shapes = {key: list(state.shape) for key, state in states.items()}
    return Offer([stat.name for stat in row.stats], row.label, row.note, shapes)


def _exchanged(mine: Offers, stats: list[str], group: Any) -> list[Offers]:
    """The offers of all ranks. Raises on every rank if they do not collect the same statistics."""
    world, device = dist.get_world_size(group), _device(group)
    text = json.dumps([stats, [[*place, *offer] for place, offer in mine.items()]]).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    first = torch.tensor([len(text), digest, -digest], device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX, group)
    longest, largest, smallest = first.tolist()
    if largest == -smallest:
        return [mine] * world
    slots = torch.zeros(world, longest, dtype=torch.uint8, device=device)
    own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    slots[dist.get_rank(group), : len(text)] = own.to(device)
    dist.all_reduce(slots, dist.ReduceOp.SUM, group)
    texts = [json.loads(bytes(slot.tolist()).rstrip(b"\0")) for slot in slots.cpu()]
    if any(theirs != stats for theirs, _ in texts):
        different = " and ".join(sorted({", ".join(theirs) for theirs, _ in texts}))
        raise SessionError(f"the ranks collect different statistics: {different}; pass the same stats= on all of them")
    return [{(path, port): Offer(*rest) for path, port, *rest in rows} for _, rows in texts]


def _union(offers: list[Offers]) -> Offers:
    """All places, in the order of the first rank that has them, with the statistics that no rank has dropped there."""
    union: Offers = {}
    for theirs in offers:
        for place, offer in theirs.items():
            known = union.setdefault(place, offer)
            shapes = {key: shape for key, shape in known.shapes.items() if key in offer.shapes}
            union[place] = known._replace(names=[name for name in known.names if name in offer.names], shapes=shapes)
            for key, shape in shapes.items():
                if shape != offer.shapes[key]:
                    raise SessionError(
                        f"the ranks have different sizes of {key!r} for the {place[1]} of {place[0]!r}: {shape} and"
                        f" {offer.shapes[key]}"
                    )
    return union


def _merged(
    union: Offers, offers: list[Offers], states: dict[Place, dict[str, Tensor]], known: dict[str, Stat], group: Any
) -> dict[Place, dict[str, Tensor]]:
    """The states of all ranks together."""
    rank = dist.get_rank(group)
    slots: list[tuple[Place, str, Tensor]] = []  # one per state, with room for one or for every rank
    for place, offer in union.items():
        for key, shape in offer.shapes.items():
            copies = 1 if known[key].additive else len(offers)
            slot = torch.zeros(copies, *shape, dtype=torch.float64, device="cpu")
            if place in states:
                slot[rank % copies] = states[place][key]
            slots.append((place, key, slot))
    empty = torch.zeros(1, dtype=torch.float64, device="cpu")
    packed = torch.cat([slot.reshape(-1) for *_, slot in slots] or [empty]).to(_device(group))
    dist.all_reduce(packed, dist.ReduceOp.SUM, group)
    merged: dict[Place, dict[str, Tensor]] = {}
    rest = packed.cpu()
    for place, key, slot in slots:
        found, rest = rest[: slot.numel()].view(slot.shape), rest[slot.numel() :]
        if not known[key].additive:
            found = found[[place in theirs for theirs in offers]]
        merged.setdefault(place, {})[key] = known[key].merge(found)
    return merged


def _device(group: Any) -> torch.device:
    return torch.device("cpu" if "gloo" in dist.get_backend(group) else "cuda")
