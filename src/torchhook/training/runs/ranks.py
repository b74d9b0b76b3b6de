"""How what each rank saw is stored: facts as JSON, and one blob of the numbers of all ranks at all places."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

import torch

from torchhook.core.untrusted import json_of
from torchhook.rules.ranks import TABLE, Member, RankStep, Split
from torchhook.stats.reading import Place
from torchhook.training.runs.blobs import packed, unpacked
from torchhook.training.runs.tables import BYTES, TEXT, WHOLE, rows


def as_columns(known: RankStep, ids: Mapping[Place, int]) -> tuple[int, str, str, bytes]:
    """The row of one step; places are written as their numbers, of those that the run has."""
    here = [number for number, place in enumerate(known.places) if place in ids]
    facts = {
        "world": known.world,
        "members": dict(known.members),
        "facts": known.facts,
        "splits": known.splits,
        "checked": sorted(known.checked),
        "parameters": known.parameters,
        "averages": known.averages,
        "split": known.split,
        "ranks": list(known.tables),
    }
    tables = [table[here] for table in known.tables.values()]
    blob = packed(torch.stack(tables)) if tables and here else b""
    return known.step, json.dumps(facts), json.dumps([ids[known.places[number]] for number in here]), blob


def steps(db: sqlite3.Connection) -> list[int]:
    """The steps of which something is known by rank; none in runs of earlier versions, or of one process."""
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'ranks'").fetchone():
        return []
    return [step for (step,) in rows(db, "SELECT step FROM ranks ORDER BY step", (WHOLE,))]


def read(db: sqlite3.Connection, step: int, places: Mapping[int, Place]) -> RankStep:
    """What each rank saw in a step."""
    query = "SELECT facts, places, data FROM ranks WHERE step = ?"
    ((facts, ids, blob),) = rows(db, query, (TEXT, TEXT, BYTES), (step,))
    return _step(step, json_of(facts), json_of(ids), blob, places)


def _step(step: int, facts: Any, ids: Any, blob: bytes, places: Mapping[int, Place]) -> RankStep:
    here, ranks = [places[number] for number in ids], [int(rank) for rank in facts["ranks"]]
    tables = unpacked([blob], len(ranks), (len(here), len(TABLE)))[0].float() if blob else ()
    return RankStep(
        step,
        int(facts["world"]),
        {int(rank): _member(member) for rank, member in facts["members"].items()},
        {int(rank): dict(known) for rank, known in facts["facts"].items()},
        here,
        dict(zip(ranks, tables, strict=True)) if blob else {},
        tuple(
            Split(str(path), str(port), str(part), tuple(map(tuple, values)))
            for path, port, part, values in facts["splits"]
        ),
        frozenset(map(str, facts["checked"])),
        int(facts["parameters"]),
        bool(facts["averages"]),
        bool(facts.get("split")),  # new in this version
    )


def _member(known: Any) -> Member:
    host, stage, lead, seen, steps, state, *more = known
    ended, error, apart = more or (0.0, "", False)  # which earlier versions did not write
    counted = None if steps is None else int(steps)
    place = str(host), int(stage), int(lead), int(seen)
    return Member(*place, counted, str(state), float(ended), str(error), bool(apart))
