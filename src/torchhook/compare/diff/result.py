"""The result of `diff`: where two models diverge, which module is at fault, and one row per compared location."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

from torchhook.captures.agreement.pairs import Unmatched
from torchhook.compare.diff.match import Match
from torchhook.core.findings import json_value
from torchhook.core.parts import ROUNDING, Bars
from torchhook.core.result import Result
from torchhook.core.site import Site

VERSION = 1
"""The version of `Difference.to_dict`; it is raised when older readers would fail."""

_HEADER = ("site", "module", "error", "cosine", "own error", "explained", "worst at", "a", "b", "dtype", "")


@dataclass(frozen=True)
class Row:
    """One location in both models.

    `error` and `cosine` compare b's value with a's, as both models run by themselves. `own` is the error that remains
    if everything before is as in a, and `explained` the part of it that rounding can make; both are None if the models
    are equal. `parts` is True if the models diverge here.
    """

    site: Site
    call: int
    partner: str  # the path in b
    kind: str  # the class of the module
    error: float
    cosine: float
    worst: tuple[int, ...]
    values: tuple[float, float]  # in a and in b, where they differ most
    dtype: str
    leaf: int = 0  # for an output gradient: the number of the tensor in the output
    own: float | None = None
    explained: float | None = None
    parts: bool = False

    def record(self) -> dict[str, Any]:
        """The row as a dict."""
        named = {"path": self.site.path, "module": self.kind, "port": self.site.port, "call": self.call}
        rest = ("partner", "error", "cosine", "own", "explained", "worst", "dtype")
        a, b = self.values
        return {**named, **{name: getattr(self, name) for name in rest}, "a": a, "b": b, "diverges": self.parts}

    def cells(self) -> list[Any]:
        """The cells of the table, as in `Difference.HEADER`."""
        return [
            place_of(self.site, self.call),
            self.kind,
            f"{self.error:.2g}",
            f"{self.cosine:.6f}",
            "" if self.own is None else f"{self.own:.2g}",
            "" if self.explained is None else f"{self.explained:.2g}",
            ", ".join(map(str, self.worst)),
            *(f"{value:.4g}" for value in self.values),
            self.dtype,
            "diverges" if self.parts else "",
        ]


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """Where two models diverge; see `torchhook.diff`.

    `first` is the first site where they diverge, or None. `module` is the path of the module at fault: that of the
    site or, if already its input differs, the module that calls it. `verdict` says so in a sentence. `rows` has one
    row per location in execution order (gradients in the order of the backward), `unmatched` the modules without a
    match, and `notes` other remarks. `step` is the step of a training at which recordings of several diverge. `match`
    is which modules of a were compared with which of b, if they are called differently; ``match.save(path)`` keeps it.
    `complete` is False if a recording ends before the model returned: the models agree as far as it goes.
    `place` is a row for `first` if that is the input of a module, and before which of `rows` it is shown.
    """

    first: Site | None
    module: str | None
    verdict: str
    rows: tuple[Row, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()
    notes: tuple[str, ...] = field(default=())
    step: int | None = None
    match: Match = field(default_factory=Match)
    complete: bool = True
    place: tuple[int, Row] | None = None

    HEADER = _HEADER

    @property
    def same(self) -> bool:
        """Whether the models agree everywhere."""
        return self.first is None

    @property
    def shown(self) -> tuple[Row, ...]:
        """The rows of the table: one per location, and one for the input where the models diverge."""
        if self.place is None:
            return self.rows
        number, row = self.place
        return *self.rows[:number], row, *self.rows[number:]

    def to_dict(self) -> dict[str, Any]:
        """The result as JSON values, for programs; numbers that are not finite are strings."""
        found = {
            "version": VERSION,
            "same": self.same,
            "complete": self.complete,
            "verdict": self.verdict,
            "step": self.step,
            "first": None if self.first is None else self.first._asdict(),
            "module": self.module,
            "notes": self.notes,
            "unmatched": [one._asdict() for one in self.unmatched],
            "match": [{"a": pair.a, "b": pair.b, "heads": pair.heads, "rotary": pair.rotary} for pair in self.match],
            "rows": self._records(),
        }
        plain: dict[str, Any] = json_value(found)
        return plain

    def lines(self) -> list[str]:
        """The notes, including the map that was used, and one for each module that was not compared."""
        lonely: dict[tuple[str, str, str], list[Unmatched]] = {}
        for one in self.unmatched:
            lonely.setdefault((_starred(one.path), one.model, one.reason), []).append(one)
        compared = [f"compared: {' + '.join(pair.a)} with {' + '.join(pair.b)} in b" for pair in self.match]
        return [*compared, *(f"note: {line}" for line in (*self.notes, *starmap(_uncompared, lonely.items())))]

    def _records(self) -> list[dict[str, Any]]:
        return [row.record() for row in self.rows]

    def _figures(self) -> list[Bars]:
        """The errors by layer, those of modules by themselves if these are others, and what rounding explains."""
        rows = [row for row in self.shown if row.site.port in ("input", "output")]
        owns: list[float | None] = [row.own for row in rows if row.own != row.error]
        errors: dict[str, list[float | None]] = {
            "error": [row.error for row in rows],
            "own error": [row.own for row in rows] if any(own is not None for own in owns) else [],
            ROUNDING: [None if row.explained == math.inf else row.explained for row in rows],
        }
        drawn = {name: line for name, line in errors.items() if any(value is not None for value in line)}
        names = [place_of(row.site, row.call) for row in rows]
        return [Bars(names, drawn, "relative error", "Where they part", log=True)] if rows else []

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        return _HEADER, [row.cells() for row in self.shown]

    def _important(self) -> int:
        return next((number for number, row in enumerate(self.shown) if row.parts), 0)

    def _title(self) -> str:
        return self.verdict

    def _foot(self) -> Sequence[str]:
        return self.lines()


def _starred(path: str) -> str:
    return ".".join("*" if name.isdecimal() else name for name in path.split("."))


def _uncompared(kind: tuple[str, str, str], held: Sequence[Unmatched]) -> str:
    """A note for some modules of one model whose names differ in numbers alone."""
    pattern, model, reason = kind
    if len(held) > 1:
        return f"{len(held)} modules {pattern!r} of {model} were not compared: {reason}"
    return f"{held[0].path or 'the model'!r} of {model} was not compared: {reason}"


def place_of(site: Site, call: int) -> str:
    """A site and a call in a few words.

    >>> place_of(Site("fc", "grad_output"), 1)
    'fc, grad_output, call 1'
    """
    words = [
        site.path or "(model)",
        *([] if site.port == "output" else [site.port]),
        *([f"call {call}"] if call else []),
    ]
    return ", ".join(words)
