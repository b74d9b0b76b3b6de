"""Merging what every rank of a process group has measured, with at most three all-reduces of one tensor each.

The first says whether all ranks have the same rows. Only if not, the second tells each what the others have. The last
has the states: those that are added to merge them are added on the way, others come in a slot of each rank's.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from torchhook.errors import SessionError
from torchhook.measured import Stats
from torchhook.stats import Moments, Stat
from torchhook.stats.reading import Place, Row, Snapshot


class Plan(NamedTuple):
    """What a rank has at one place: names of statistics, class of the module, note, and shapes of the states."""

    stats: list[str]
    label: str
    note: str
    shapes: dict[str, list[int]]


Plans = dict[Place, Plan]


def merge(stats: Stats | Snapshot, group: Any = None) -> Snapshot:
    """What all ranks of `group` (none: the default one) have measured, on each of them; every rank has to call it.

    A rank may have seen nothing, or other places than the others. Outside of a process group it is a plain snapshot.

    >>> from torch import nn
    >>> from torchhook import distributed, measure
    >>> model = nn.Sequential(nn.ReLU())
    >>> with measure(model) as stats:
    ...     _ = model(torch.ones(3))
    >>> distributed.merge(stats)["0"].count
    3
    """
    if not isinstance(stats, (Stats, Snapshot)):
        raise TypeError(f"stats must be what measure gave or a snapshot of it, not {stats!r:.80}")
    snapshot = stats if isinstance(stats, Snapshot) else stats.snapshot()
    if not (dist.is_available() and dist.is_initialized()):
        return snapshot
    states = {place: reading.states() for place, reading in snapshot.items()}
    mine = {place: _plan(row, states[place]) for place, row in snapshot.rows.items()}
    plans = _exchanged(mine, group)
    merged = _added(plans, states, _known(snapshot), group)
    world = dist.get_world_size(group)
    rows = {place: _row(plan, merged[place], _known(snapshot), world) for place, plan in _union(plans).items()}
    return Snapshot(rows, snapshot.aliases, snapshot.stats)


def _plan(row: Row, states: dict[str, Tensor]) -> Plan:
    shapes = {key: list(state.shape) for key, state in states.items()}
    return Plan([stat.name for stat in row.stats], row.label, row.note, shapes)


def _exchanged(mine: Plans, group: Any) -> list[Plans]:
    """The plans of all ranks."""
    world, device = dist.get_world_size(group), _device(group)
    text = json.dumps([[*place, *plan] for place, plan in mine.items()]).encode()
    digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    first = torch.tensor([len(text), digest, -digest], device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX, group)
    longest, largest, smallest = first.tolist()
    if largest == -smallest:
        return [mine] * world
    slots = torch.zeros(world, longest, dtype=torch.uint8, device=device)
    slots[dist.get_rank(group), : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.all_reduce(slots, dist.ReduceOp.SUM, group)
    texts = [bytes(slot.tolist()).rstrip(b"\0") for slot in slots.cpu()]
    return [{(path, port): Plan(*rest) for path, port, *rest in json.loads(text)} for text in texts]


def _added(
    plans: list[Plans], states: dict[Place, dict[str, Tensor]], known: dict[str, Stat], group: Any
) -> dict[Place, dict[str, Tensor]]:
    """The states of all ranks together."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    slots: list[tuple[Place, str, Tensor]] = []  # of every state, one or one a rank
    for place, plan in _union(plans).items():
        for key, shape in plan.shapes.items():
            copies = 1 if known[key].additive else world
            slot = torch.zeros(copies, *shape, dtype=torch.float64)
            if key in states.get(place, {}):
                slot[rank % copies] = states[place][key]
            slots.append((place, key, slot))
    packed = torch.cat([slot.reshape(-1) for *_, slot in slots] or [torch.zeros(1, dtype=torch.float64)])
    packed = packed.to(_device(group))
    dist.all_reduce(packed, dist.ReduceOp.SUM, group)
    packed = packed.cpu()
    merged: dict[Place, dict[str, Tensor]] = {}
    for place, key, slot in slots:
        found, packed = packed[: slot.numel()].view(slot.shape), packed[slot.numel() :]
        if not known[key].additive:
            found = found[[place in theirs for theirs in plans]]
        merged.setdefault(place, {})[key] = known[key].merge(found)
    return merged


def _union(plans: list[Plans]) -> Plans:
    """All places, in the order of the first rank that has them."""
    union: Plans = {}
    for theirs in plans:
        for place, plan in theirs.items():
            if union.setdefault(place, plan).shapes != plan.shapes:
                raise SessionError(
                    f"the ranks have states of different shapes for the {place[1]} of {place[0]!r}"
                    f" ({union[place].shapes} and {plan.shapes}); measure the same statistics everywhere"
                )
    return union


def _known(snapshot: Snapshot) -> dict[str, Stat]:
    """The statistics by name and by key."""
    stats = (Moments(), *snapshot.stats)
    return {stat.key: stat for stat in stats} | {stat.name: stat for stat in stats}


def _row(plan: Plan, states: dict[str, Tensor], known: dict[str, Stat], world: int) -> Row:
    unknown = [name for name in plan.stats if name not in known]
    if unknown:
        raise SessionError(f"another rank collects {unknown[0]!r}, which this one knows nothing of; measure the same")
    note = f"{plan.note}; of all {world} ranks" if plan.note else f"of all {world} ranks"
    readers = {key: [lambda state=state: state] for key, state in states.items()}
    return Row(tuple(known[name] for name in plan.stats), plan.label, note, readers)  # type: ignore[arg-type]


def _device(group: Any) -> torch.device:
    return torch.device("cpu" if "gloo" in dist.get_backend(group) else "cuda")
