"""How an entry is stored: groups of states of equal shape, and the facts about each place."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.rules.entry import Entry
from torchhook.stats import Covariance, Stat, named
from torchhook.stats.reading import Place, Reading, Row


class Group(NamedTuple):
    """States of one shape, of one statistic and port, as they are stored together: steps × places × shape."""

    stat: str
    port: str
    places: list[Place]
    steps: list[int]
    states: Tensor


def grouped(entry: Entry) -> Iterator[Group]:
    """The states of an entry, in a few groups. Covariances are left out: they are larger than all others together."""
    together: dict[tuple[str, str, torch.Size], dict[Place, Tensor]] = {}
    for place, row in entry.snapshot.rows.items():
        for key in {stat.key: None for stat in row.stats}:
            reads = row.states.get(key, ())
            if reads and key != Covariance.name:
                state = reads[0]() if len(reads) == 1 else Reading(place, row).state(key)
                together.setdefault((key, place[1].partition("[")[0], state.shape), {})[place] = state
    for (key, port, _), states in together.items():
        yield Group(key, port, list(states), [entry.step], torch.stack(list(states.values()))[None])


def settings_of(stat: Stat) -> dict[str, Any]:
    """The settings of a statistic that are numbers; those of torchhook have no others."""
    return {name: value for name, value in vars(stat).items() if name[0] != "_" and _is_plain(value)}


@lru_cache(4096)  # most places of a model have the same facts
def row_of(label: str, note: str, stats: str, failed: str) -> Row:
    """A row without states, from what is stored about a place. Statistics that are not torchhook's are left out."""
    known = [stat for name, settings in json.loads(stats).items() if (stat := _known(name, settings)) is not None]
    return Row(tuple(known), label, note, {}, json.loads(failed))


def text(name: str) -> str:
    """A name as SQLite can store it: lone surrogates are escaped.

    >>> text("fc\\ud800")
    'fc\\\\ud800'
    """
    return name.encode(errors="backslashreplace").decode()


def _known(name: str, settings: Mapping[str, Any]) -> Stat | None:
    try:
        stat = named(name)
    except ValueError:
        return None
    for setting in vars(stat).keys() & settings.keys():
        value = settings[setting]
        setattr(stat, setting, tuple(value) if isinstance(value, list) else value)
    return stat


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (int, float))
