"""`Share`: what one rank, or several together, measured in one step, and how two shares are merged.

Activations of ranks with different samples are merged as statistics. Of ranks that work on the same samples (a team),
those with equal states are copies and count once, the others are parts and are joined. What is narrower than the whole
layer is a part however it looks; of all else it is decided once, for copies may drift apart. Parameters that several
ranks have are not merged: a `Vote` says which value one had and on how many ranks, so that copies that part are seen.
Of those of which each rank has a part of its own, the squares of the norms are added up.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.rules.entry import Entry
from torchhook.rules.ranks import TABLE
from torchhook.stats import Channels, Covariance, Moments
from torchhook.stats.kernels.plain import FIELDS, moments_of_each
from torchhook.stats.reading import Place, Row, Snapshot, kept
from torchhook.training.ranks.seat import Seat
from torchhook.training.runs.groups import grouped, row_of, settings_of

SUMS = ("param", "buffer", "state")
"""Ports of checksums: of a parameter, a buffer, and the optimizer's state of a parameter."""

NUMBERS = ("param_norm", "param_grad_norm", "step_grad_norm", "update_norm", "update_ratio")
"""Ports with one value per parameter and step."""

MOST_RANKS = 64
"""Of more ranks, the oddest have a table."""

_MOST_VALUES = 4  # that a parameter may have on different ranks; those on the fewest ranks are dropped
_NAMED = 8  # ranks that a vote names
_INTEGER, _DOUBLE = struct.Struct("q"), struct.Struct("d")
_WIDTH = len(FIELDS)
_MEAN, _MIN, _MAX = map(FIELDS.index, ("mean", "min", "max"))

Cell = tuple[int, str, str]
"""A stage, a path and a port."""

Blocks = dict[tuple[str, tuple[int, ...]], tuple[list[Cell], Tensor]]
"""By statistic and shape: the cells, and their states."""

VoteKey = tuple[int, str, str, str]
"""A stage, a path, a port and the part of the parameter."""


Decided = dict[tuple[tuple[int, ...], Cell], tuple[int, ...]]
"""By team and cell: the ranks whose states count; those of the others are copies."""


class Vote(NamedTuple):
    """The bits of a value, the first ranks that have it, and the number of ranks that do."""

    bits: int
    ranks: tuple[int, ...]
    total: int


@dataclass
class Share:
    """What some ranks measured in one step."""

    step: int
    facts: dict[int, dict[str, Any]] = field(default_factory=dict)  # by rank: loss, seconds, hash of the inputs, …
    losses: dict[int, tuple[float, int]] = field(default_factory=dict)  # by step: the sum, and of how many
    places: dict[Cell, tuple[str, ...]] = field(default_factory=dict)  # label, note, statistics and failures, as JSON
    done: Blocks = field(default_factory=dict)
    open: dict[int, dict[int, Blocks]] = field(default_factory=dict)  # of teams that are not complete, by lead and rank
    squares: Blocks = field(default_factory=dict)  # of the norms of parts that only one rank has
    first: Blocks = field(default_factory=dict)  # of which the first rank's count; the port ends with the part
    votes: dict[VoteKey, list[Vote]] = field(default_factory=dict)
    tables: dict[int, tuple[list[Cell], Tensor]] = field(default_factory=dict)
    decided: Decided = field(default_factory=dict)  # which is not sent

    @staticmethod
    def of(entry: Entry, seat: Seat) -> Share:
        """The share of one rank."""
        share = Share(entry.step)
        share.losses = {step: (loss, 1) for step, loss in entry.losses.items()}
        blocks: Blocks = {}
        for group in grouped(entry):
            if _stat(group.stat) is None:  # one of the user's own, which other processes may not have
                continue
            cells = [(seat.stage, *place) for place in group.places]
            states = group.states[0]
            if group.port in NUMBERS or group.port.startswith("param"):
                for here, is_sole in _divided(cells, seat):
                    share._add_parameters(group.stat, [cells[number] for number in here], states[here], seat, is_sole)
            else:
                _add(blocks, group.stat, cells, states)
        texts: dict[tuple[int, ...], str] = {}  # most places have the same statistics
        for place, row in entry.snapshot.rows.items():
            path, port = place
            share.places[seat.stage, path, port] = _described(row, texts)
        local = dict(entry.local)
        sums = local.pop("sums", {})
        sums = {(port, path): number for (port, path), number in sums.items() if path not in seat.sole}
        share._vote([(seat.stage, path, port) for port, path in sums], list(sums.values()), seat)
        share.tables = {seat.rank: _table(blocks)}
        share.facts = {seat.rank: {**local, **share._facts(*share.tables[seat.rank])}}
        if len(seat.team) > 1:
            share.open = {seat.lead: {seat.rank: _marked(blocks, entry.snapshot, seat)}}
        else:
            share.done = combined(share.done, blocks, merged)
        return share

    def merge(self, other: Share, teams: Mapping[int, int]) -> None:
        """Add what other ranks measured in the same step; `teams` has the sizes of the teams by their leads."""
        self.facts |= other.facts
        for step, (total, count) in other.losses.items():
            before = self.losses.get(step, (0.0, 0))
            self.losses[step] = before[0] + total, before[1] + count
        self.places = {
            **self.places,
            **{cell: known for cell, known in other.places.items() if cell not in self.places},
        }
        self.done = combined(self.done, other.done, merged)
        self.first = combined(self.first, other.first, lambda stat, states: states[0])
        self.squares = combined(self.squares, other.squares, lambda stat, states: states.sum(0))
        for lead, members in other.open.items():
            self.open.setdefault(lead, {}).update(members)
        self.close({lead for lead, members in self.open.items() if len(members) >= teams.get(lead, 1)})
        for key, votes in other.votes.items():
            self.votes[key] = _counted([*self.votes.get(key, ()), *votes])
        self.tables = _oddest(self.tables | other.tables)

    def close(self, leads: Iterable[int] | None = None) -> None:
        """Join the parts of these teams (by default of all), of which all that will come is here."""
        for lead in list(self.open) if leads is None else leads:
            members = self.open.pop(lead)
            self.done = combined(self.done, joined(members, self.decided), merged)

    def snapshot(self, own: Snapshot, teams: int) -> Snapshot:
        """All places as they are written to a run. `own` adds what is never sent; of `teams` averaged gradients."""
        self.close()
        states: dict[Cell, dict[str, Tensor]] = {}
        for (stat, _), (cells, found) in self.done.items():
            averaged = scaled(found, 1 / teams) if teams > 1 and stat == Moments.name else found
            for cell, state, gradient in zip(cells, found, averaged, strict=True):
                is_gradient = cell[2].startswith("grad_output")
                states.setdefault(cell, {}).setdefault(stat, gradient if is_gradient else state)
        for (stat, _), (cells, found) in _without_parts(self.first).items():
            for cell, state in zip(cells, found, strict=True):
                states.setdefault(cell, {})[stat] = state
        numbers = self._numbers()
        of_each = moments_of_each(torch.tensor([*numbers.values()], dtype=torch.float64))
        for cell, state in zip(numbers, of_each, strict=True):
            states.setdefault(cell, {})[Moments.name] = state
        names = named(states)
        rows: dict[Place, Row] = {}
        for cell in sorted((cell for cell in self.places if cell in states), key=lambda cell: cell[0]):
            label, note, stats, failed = self.places[cell]
            readers = {stat: [_reader(state)] for stat, state in states[cell].items()}
            row = row_of(label, f"{note}; of {len(self.facts)} ranks", stats, failed)
            here = tuple(stat for stat in row.stats if stat.key in readers)
            rows[names[cell], cell[2]] = row._replace(states=readers, stats=here)
        return Snapshot({place: _with_own(row, own.rows.get(place)) for place, row in rows.items()})

    def apart(self) -> Iterator[tuple[VoteKey, tuple[tuple[float, int, int], ...]]]:
        """The parameters that do not have one value on all ranks: their values, with the first rank and how many."""
        whole: dict[tuple[int, str], int] = {}
        counts = {key: sum(vote.total for vote in votes) for key, votes in self.votes.items()}
        for (stage, _, port, _), count in counts.items():
            whole[stage, port] = max(whole.get((stage, port), 0), count)
        for key, votes in self.votes.items():
            stage, path, port, part = key
            if port == "param_grad_norm" and len(self.votes.get((stage, path, "step_grad_norm", part), ())) < 2:
                continue  # before ranks average theirs
            values = [(vote.bits if port in SUMS else value_of(vote.bits), vote.ranks[0], vote.total) for vote in votes]
            if port == "update_norm" and not part and (missing := whole[stage, port] - counts[key]):
                named = {rank for vote in votes for rank in vote.ranks}
                first = min(self.facts.keys() - named, default=-1)
                values.append((0.0, first, missing))  # the optimizer there does not have it
            if len(values) > 1:
                yield key, tuple(values)

    def _facts(self, cells: list[Cell], table: Tensor) -> dict[str, Any]:
        """What is said of a rank: its latest loss, the norm of its gradients, the first place that is not finite."""
        facts: dict[str, Any] = {}
        if self.losses:
            facts["loss"] = self.losses[max(self.losses)][0]
        broken_losses = [step for step, (loss, _) in self.losses.items() if not math.isfinite(loss)]
        if broken_losses:
            facts["nonfinite_loss"] = min(broken_losses)
        norms = [value_of(votes[0].bits) for key, votes in self.votes.items() if key[2] == "param_grad_norm"]
        norms += [square**0.5 for cell, square in self._squares() if cell[2] == "param_grad_norm"]
        if norms:
            facts["grad_norm"] = math.hypot(*norms)
        broken = table[:, TABLE.index("nonfinite")].nonzero().flatten().tolist()
        if broken:
            facts["nonfinite"] = cells[broken[0]][1:]
        return facts

    def _add_parameters(self, stat: str, cells: list[Cell], states: Tensor, seat: Seat, is_sole: bool) -> None:
        is_number = bool(cells) and cells[0][2] in NUMBERS
        if is_number and is_sole:
            _add(self.squares, "squares", cells, _values(states).square())
        elif is_number:
            self._vote(cells, _values(states).view(torch.int64).tolist(), seat)
        elif is_sole:
            _add(self.done, stat, cells, states)
        else:
            _add(self.first, stat, [_of_part(cell, seat) for cell in cells], states)

    def _vote(self, cells: list[Cell], bits: list[int], seat: Seat) -> None:
        for (stage, path, port), value in zip(cells, bits, strict=True):
            self.votes[stage, path, port, seat.shards.get(path, "")] = [Vote(value, (seat.rank,), 1)]

    def _numbers(self) -> dict[Cell, float]:
        """One value per parameter and port: that of the first rank, or of all parts together."""
        parts: dict[Cell, dict[str, float]] = {}
        for (stage, path, port, part), votes in self.votes.items():
            if port in NUMBERS:
                parts.setdefault((stage, path, port), {})[part] = value_of(votes[0].bits)
        whole = {cell: math.hypot(*by_part.values()) for cell, by_part in parts.items()}
        whole |= {cell: next(iter(by_part.values())) for cell, by_part in parts.items() if len(by_part) == 1}
        whole |= {cell: square**0.5 for cell, square in self._squares()}
        for stage, path, port in list(whole):
            if port == "update_ratio" and len(parts.get((stage, path, port), ())) != 1:  # those of parts do not add up
                norm = whole.get((stage, path, "param_norm"), math.nan)
                change = whole.get((stage, path, "update_norm"), math.nan)
                whole[stage, path, port] = change / norm if norm else math.nan
        return whole

    def _squares(self) -> Iterator[tuple[Cell, float]]:
        for cells, squares in self.squares.values():
            yield from zip(cells, squares.tolist(), strict=True)


def combined(a: Blocks, b: Blocks, how: Callable[[str, Tensor], Tensor]) -> Blocks:
    """The blocks of both; cells that both have become one by `how`, from both states stacked."""
    found = dict(a)
    for key, (cells, states) in b.items():
        if key not in found:
            found[key] = cells, states
            continue
        mine, ours = found[key]
        if mine == cells:
            found[key] = mine, how(key[0], torch.stack([ours, states]))
            continue
        at = {cell: number for number, cell in enumerate(mine)}
        both = [(at[cell], number) for number, cell in enumerate(cells) if cell in at]
        rest = [number for number, cell in enumerate(cells) if cell not in at]
        ours = ours.clone()
        if both:
            left, right = map(list, zip(*both, strict=True))
            ours[left] = how(key[0], torch.stack([ours[left], states[right]]))
        found[key] = [*mine, *(cells[number] for number in rest)], torch.cat([ours, states[rest]])
    return found


def merged(stat: str, states: Tensor) -> Tensor:
    """States of the same cells, along the first dimension, as one."""
    whole: Tensor = _stat(stat).merge(states)
    return whole


def joined(members: Mapping[int, Blocks], decided: Decided) -> Blocks:
    """What a team saw: of copies one, of others all, as parts of the same value."""
    team = tuple(sorted(members))
    together: dict[Cell, dict[str, dict[int, Tensor]]] = {}
    for rank in team:
        for (stat, _), (cells, states) in members[rank].items():
            for cell, state in zip(cells, states, strict=True):
                together.setdefault(cell, {}).setdefault(stat, {})[rank] = state
    found: dict[tuple[str, tuple[int, ...]], list[tuple[Cell, Tensor]]] = {}
    for (stage, path, port), by_stat in together.items():
        port, mark, _ = port.partition("#")
        cell = stage, path, port
        counted = team if mark else decided.get((team, cell)) or _decide(team, cell, by_stat, decided)
        for stat, known in by_stat.items():
            whole = _whole(stat, [known[rank] for rank in counted if rank in known] or [*known.values()][:1])
            found.setdefault((stat, tuple(whole.shape)), []).append((cell, whole))
    return {
        key: ([cell for cell, _ in pairs], torch.stack([state for _, state in pairs])) for key, pairs in found.items()
    }


def _decide(
    team: tuple[int, ...], cell: Cell, by_stat: Mapping[str, Mapping[int, Tensor]], decided: Decided
) -> tuple[int, ...]:
    """The ranks whose states are not those of a rank before. Nothing follows for other steps from constants."""
    stat = Moments.name if Moments.name in by_stat else next(iter(by_stat))
    first: dict[bytes, int] = {}
    for rank, state in by_stat[stat].items():
        first.setdefault(state.contiguous().numpy().tobytes(), rank)
    counted = tuple(first.values())
    vary = stat != Moments.name or all(state[_MIN] < state[_MAX] for state in by_stat[stat].values())
    if len(counted) == len(team) or vary:
        decided[team, cell] = counted
    return counted


def scaled(moments: Tensor, factor: float) -> Tensor:
    """Moments of the same values times a positive factor."""
    powers = {"mean": 1, "abs_sum": 1, "m2": 2, "m3": 3, "m4": 4, "min": 1, "max": 1}
    return moments * torch.tensor([factor ** powers.get(name, 0) for name in FIELDS], dtype=moments.dtype)


def value_of(bits: int) -> float:
    """The number that has these bits."""
    return float(_DOUBLE.unpack(_INTEGER.pack(bits))[0])


def _whole(stat: str, parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if stat == Channels.name:  # each has other units
        return torch.cat(parts, -1)
    return merged(stat, torch.stack(parts))


def _marked(blocks: Blocks, snapshot: Snapshot, seat: Seat) -> Blocks:
    """The same, with a mark at the ports of those that are parts of the value of a whole layer."""

    def is_part(path: str, port: str) -> bool:
        shape = snapshot.rows[path, port].shape
        return shape is not None and len(shape) > 0 and shape[-1] < seat.widths.get((path, port), 0)

    return {
        key: ([(stage, path, f"{port}#" if is_part(path, port) else port) for stage, path, port in cells], states)
        for key, (cells, states) in blocks.items()
    }


def _add(blocks: Blocks, stat: str, cells: list[Cell], states: Tensor) -> None:
    key = stat, tuple(states.shape[1:])
    known, before = blocks.get(key, ([], states[:0]))
    blocks[key] = [*known, *cells], torch.cat([before, states])


def _divided(cells: list[Cell], seat: Seat) -> list[tuple[list[int], bool]]:
    """The positions of parameters that several ranks have, and of those whose part only this one has."""
    is_sole = [path in seat.sole for _, path, _ in cells]
    found = [([number for number, sole in enumerate(is_sole) if sole == kind], kind) for kind in (False, True)]
    return [(here, kind) for here, kind in found if here]


def _of_part(cell: Cell, seat: Seat) -> Cell:
    stage, path, port = cell
    return stage, path, f"{port}#{seat.shards.get(path, '')}"


def _without_parts(blocks: Blocks) -> Blocks:
    """The same with the parts of each parameter merged."""
    whole: Blocks = {}
    for key, (cells, states) in blocks.items():
        parts: dict[str, list[int]] = {}
        for number, (_, _, port) in enumerate(cells):
            parts.setdefault(port.partition("#")[2], []).append(number)
        for numbers in parts.values():
            named = [(stage, path, port.partition("#")[0]) for stage, path, port in map(cells.__getitem__, numbers)]
            whole = combined(whole, {key: (named, states[numbers])}, merged)
    return whole


def _described(row: Row, texts: dict[tuple[int, ...], str]) -> tuple[str, ...]:
    """The facts about a place. `texts` has the settings of statistics that were met before."""
    key = tuple(map(id, row.stats))
    if key not in texts:
        texts[key] = json.dumps({stat.name: settings_of(stat) for stat in row.stats if stat.key != Covariance.name})
    return row.label, row.note, texts[key], json.dumps(row.failed) if row.failed else "{}"


def _counted(votes: list[Vote]) -> list[Vote]:
    """Equal votes together: first that of the first rank, then those of most ranks."""
    by_bits: dict[int, Vote] = {}
    for vote in votes:
        known = by_bits.get(vote.bits, Vote(vote.bits, (), 0))
        ranks = tuple(sorted((*known.ranks, *vote.ranks))[:_NAMED])
        by_bits[vote.bits] = Vote(vote.bits, ranks, known.total + vote.total)
    first, *rest = sorted(by_bits.values(), key=lambda vote: vote.ranks)
    return [first, *sorted(rest, key=lambda vote: (-vote.total, vote.ranks))[: _MOST_VALUES - 1]]


def _values(states: Tensor) -> Tensor:
    """The numbers that these are the moments of, one each."""
    nan, high, low = (states[:, FIELDS.index(name)] > 0 for name in ("nan", "posinf", "neginf"))
    return states[:, _MEAN].masked_fill(nan, math.nan).masked_fill(high, math.inf).masked_fill(low, -math.inf)


def _table(blocks: Blocks) -> tuple[list[Cell], Tensor]:
    cells, states = blocks.get((Moments.name, (_WIDTH,)), ([], torch.zeros(0, _WIDTH, dtype=torch.float64)))
    of = dict(zip(FIELDS, states.unbind(-1), strict=True))
    nonfinite = of["nan"] + of["posinf"]  # -Inf is what masks are made of
    n = of["count"] - nonfinite - of["neginf"]
    some = n > 0
    std = (of["m2"] / (n - 1).clamp(min=1)).clamp(min=0).sqrt()
    numbers = [of["mean"], std, of["min"], of["max"]]
    known = [torch.where(some, number, math.nan) for number in numbers]
    return cells, torch.stack([*known, of["zeros"] / of["count"].clamp(min=1), nonfinite], -1).float()


def _oddest(tables: dict[int, tuple[list[Cell], Tensor]]) -> dict[int, tuple[list[Cell], Tensor]]:
    if len(tables) <= MOST_RANKS:
        return tables
    usual = _usual(tables)
    odd = {
        rank: float((_sizes(table) - usual.get(len(cells), 0)).abs().nan_to_num().amax())
        for rank, (cells, table) in tables.items()
    }
    chosen = sorted(tables, key=lambda rank: (-odd[rank], rank))[:MOST_RANKS]
    return {rank: tables[rank] for rank in sorted(chosen)}


def _usual(tables: Mapping[int, tuple[list[Cell], Tensor]]) -> dict[int, Tensor]:
    """The usual sizes, by the number of cells, as ranks of the same stage have them."""
    alike: dict[int, list[Tensor]] = {}
    for cells, table in tables.values():
        alike.setdefault(len(cells), []).append(_sizes(table))
    return {number: torch.stack(sizes).nanmedian(0).values for number, sizes in alike.items()}


def _sizes(table: Tensor) -> Tensor:
    """The logarithms of the root mean squares."""
    return (table[:, 0].square() + table[:, 1].square()).clamp(min=1e-30).log()


def named(cells: Iterable[Cell]) -> dict[Cell, str]:
    """The path of each cell in the run: with its stage, if several stages have the same path."""
    stages: dict[str, set[int]] = {}
    for stage, path, _ in cells:
        stages.setdefault(path, set()).add(stage)
    return {cell: _name(cell, len(stages[cell[1]]) > 1) for cell in cells}


def _name(cell: Cell, is_shared: bool) -> str:
    return f"stage{cell[0]}.{cell[1]}".rstrip(".") if is_shared else cell[1]


def _with_own(row: Row, own: Row | None) -> Row:
    """The row with the statistics that are never sent, such as covariances: they are those of this rank alone."""
    if own is None:
        return row
    left = [stat for stat in own.stats if stat.key not in row.states and stat.key in own.states]
    return row._replace(
        stats=(*row.stats, *left),
        states=row.states | {stat.key: own.states[stat.key] for stat in left},
        shape=own.shape,
    )


def _reader(state: Tensor) -> Callable[[], Tensor]:
    return lambda: kept(state)


def _stat(key: str) -> Any:
    """torchhook's statistic with this key; None if there is none."""
    return next(iter(row_of("", "", json.dumps({key: {}}), "{}").stats), None)
