"""What is answered to an agent: small pieces of plain data, which become JSON with a schema.

`left_out` says how many items of a list an answer does not have, by the name of the list; it is empty if it has all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchhook.core.findings import json_value
from torchhook.render.words import short

Number = float | str | None
"""A number as JSON can hold it: NaN and infinities are strings, what was not measured is null."""


@dataclass(frozen=True)
class RunRow:
    """A run in a list. If it cannot be read, `unreadable` says why, and nothing else is known."""

    run: str
    state: str = "unreadable"
    model: str = ""
    started: str = ""
    last_step: int | None = None
    errors: int = 0
    warnings: int = 0
    unreadable: str | None = None


@dataclass(frozen=True)
class Runs:
    """The runs, newest first."""

    runs: list[RunRow]
    left_out: dict[str, int]


@dataclass(frozen=True)
class Line:
    """The values of one layer or parameter; of the whole model, if the path is empty."""

    path: str
    values: list[Number]


@dataclass(frozen=True)
class Curves:
    """A number by step: each line has one value for each of the steps."""

    run: str
    what: str
    steps: list[int]
    lines: list[Line]
    left_out: dict[str, int]


@dataclass(frozen=True)
class LayerRow:
    """A layer: its class, the source line that calls it, its numbers in one step, and the codes of what was found."""

    path: str
    module: str
    line: str | None
    findings: list[str]
    mean: Number
    std: Number
    zero_fraction: Number
    nonfinite: Number
    grad_norm: Number


@dataclass(frozen=True)
class LayersAnswer:
    """The layers in the order of execution, with the numbers of the last measured step."""

    run: str
    step: int | None
    ports: list[str]
    layers: list[LayerRow]
    left_out: dict[str, int]


@dataclass(frozen=True)
class ComparedRun:
    """A run beside others: how its loss went, and what was found."""

    run: str
    state: str
    last_step: int | None
    first_loss: Number
    last_loss: Number
    lowest_loss: Number
    lowest_at: int | None
    findings: list[str]


@dataclass(frozen=True)
class Differing:
    """Something that differs: its value in each of the runs."""

    name: str
    values: list[Number]


@dataclass(frozen=True)
class Comparison:
    """Runs side by side. Lists of values are in the order of `runs`."""

    runs: list[ComparedRun]
    settings: list[Differing]
    std: list[Differing]
    grad_norm: list[Differing]
    left_out: dict[str, int]


@dataclass(frozen=True)
class RuleRow:
    """A rule: what it finds, what to do about it, and when it is mistaken."""

    code: str
    name: str
    severity: str
    cause: str
    finds: str
    what_to_do: str | None
    when_wrong: str | None


@dataclass(frozen=True)
class Rules:
    """The rules, by code."""

    rules: list[RuleRow]
    left_out: dict[str, int]


class Cut:
    """Makes values small: long lists, mappings and texts are cut, and there is only so much room in all.

    >>> cut = Cut({"findings": 2})
    >>> cut({"findings": [{"code": "TH201"}, {"code": "TH202"}, {"code": "TH203"}]}), cut.left_out
    ({'findings': [{'code': 'TH201'}, {'code': 'TH202'}]}, {'findings': 1})
    """

    def __init__(self, most: Mapping[str, int]) -> None:
        self.left_out: dict[str, int] = {}
        self._most = most
        self._room = 3000  # items

    def __call__(self, value: Any, name: str = "") -> Any:
        """A copy of a value for JSON; `name` is the key that it has."""
        if isinstance(value, str):
            return short(value)
        if isinstance(value, Mapping):
            return {short(str(key)): self(item, str(key)) for key, item in self._first(list(value.items()), name)}
        if isinstance(value, (list, tuple)):
            return [self(item, name) for item in self._first(value, name)]
        return json_value(value)

    def _first(self, items: Sequence[Any], name: str) -> Sequence[Any]:
        kept = items[: min(self._most.get(name, 60), self._room)]
        self._room -= len(kept)
        if len(kept) < len(items):
            self.left_out[name] = self.left_out.get(name, 0) + len(items) - len(kept)
        return kept
