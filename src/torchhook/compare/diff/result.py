"""What `diff` gives back: where two models part, whose doing it is, and a row for every place that was compared."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

from torchhook.captures.agreement.pairs import Unmatched
from torchhook.core.site import Site
from torchhook.core.text import html_table, table

_HEADER = ("site", "module", "error", "cosine", "own error", "explained", "worst at", "a", "b", "dtype", "")


@dataclass(frozen=True)
class Row:
    """One place of both models.

    `error` and `cosine` are those of b's value against a's, in two plain runs; `own` is the error that is left when all
    before it is as in a, and `explained` how much of that rounding may make; both are None where nothing was in doubt.
    """

    site: Site
    call: int
    partner: str  # the path in b
    kind: str  # the class of the module
    error: float
    cosine: float
    worst: tuple[int, ...]
    values: tuple[float, float]  # of a and of b, where they are farthest apart
    dtype: str
    leaf: int = 0  # of a gradient: which of the tensors of the output it belongs to
    own: float | None = None
    explained: float | None = None
    parts: bool = False

    def cells(self) -> list[Any]:
        """What a table shows."""
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
            "parts" if self.parts else "",
        ]


@dataclass(frozen=True, repr=False)
class Difference:
    """Where two models part; see `torchhook.diff`.

    `first` is the first site at which they do, None if they do not. `module` is the path of the module whose doing it
    is: that of the site, or, where already what it is given differs, the one that calls it. `verdict` says it in a
    sentence, `table` has the rows in execution order (gradients in that of the backward), `unmatched` what has no
    partner, `notes` what else there is to know.
    """

    first: Site | None
    module: str | None
    verdict: str
    table: tuple[Row, ...] = ()
    unmatched: tuple[Unmatched, ...] = ()
    notes: tuple[str, ...] = field(default=())

    HEADER = _HEADER

    @property
    def same(self) -> bool:
        """Whether they part nowhere."""
        return self.first is None

    def lines(self) -> list[str]:
        """What there is to say besides the table."""
        lonely = [
            f"{one.path or 'the model'!r} of {one.model} was not compared: {one.reason}" for one in self.unmatched
        ]
        return [f"note: {line}" for line in (*self.notes, *lonely)]

    def __repr__(self) -> str:
        return "\n".join([self.verdict, table(_HEADER, [row.cells() for row in self.table]), *self.lines()])

    def _repr_html_(self) -> str:
        rest = "".join(f"<p>{html.escape(line)}</p>" for line in self.lines())
        return f"<p>{html.escape(self.verdict)}</p>{html_table(_HEADER, [row.cells() for row in self.table])}{rest}"


def place_of(site: Site, call: int) -> str:
    """A place in a few words.

    >>> place_of(Site("fc", "grad_output"), 1)
    'fc, grad_output, call 1'
    """
    words = [
        site.path or "(model)",
        *([] if site.port == "output" else [site.port]),
        *([f"call {call}"] if call else []),
    ]
    return ", ".join(words)
