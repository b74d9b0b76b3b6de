"""The connections between listed layers, drawn as wires beside the list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import quote

ROW = 36  # pixels: height of a line of the list
_LANE, _NEAR = 10, 14  # pixels between two lanes, and from the list to the first
_MOST = 14  # lanes; further wires are only named in the text
_STYLE = (
    "path{fill:none;stroke:#6b7280;stroke-width:1.5}.tip{fill:#6b7280;stroke:none}"
    "@media(prefers-color-scheme:dark){path{stroke:#9ca3af}.tip{fill:#9ca3af}}"
)


class Wire(NamedTuple):
    """A connection from one line of the list to another."""

    start: int
    end: int


def in_lanes(wires: Iterable[Wire]) -> list[tuple[Wire, int]]:
    """Each wire with a lane where it overlaps no other, short wires innermost; wires without a free lane are left out.

    >>> in_lanes([Wire(0, 1), Wire(1, 2), Wire(0, 2)])
    [(Wire(start=0, end=1), 0), (Wire(start=1, end=2), 0), (Wire(start=0, end=2), 1)]
    """
    lanes: list[list[tuple[int, int]]] = []
    placed = []
    for wire in sorted(wires, key=lambda wire: (abs(wire.end - wire.start), wire)):
        low, high = sorted(wire)
        for number in range(_MOST):
            if number == len(lanes):
                lanes.append([])
            if all(high <= first or last <= low for first, last in lanes[number]):
                lanes[number].append((low, high))
                placed.append((wire, number))
                break
    return placed


def picture(wires: Iterable[Wire], lines: int) -> tuple[str, int]:
    """The wires beside a list of this many lines, as the data URL of an SVG, and its width."""
    placed = in_lanes(wires)
    wide = _NEAR + _LANE * (1 + max((lane for _, lane in placed), default=0))
    drawn = "".join(_drawn(wire, wide - _NEAR - _LANE * lane, wide) for wire, lane in placed)
    high = lines * ROW
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" viewBox="0 0 {wide} {high}">'
        f"<style>{_STYLE}</style>{drawn}</svg>"
    )
    return f"data:image/svg+xml,{quote(svg)}", wide


def _drawn(wire: Wire, x: int, wide: int) -> str:
    """The path of a wire: out of one line below its middle, along the lane, into the other above its middle."""
    way = 1 if wire.end > wire.start else -1
    start, end = (wire.start + 0.5) * ROW + 4 * way, (wire.end + 0.5) * ROW - 4 * way
    out = f"M{wide} {start}H{x + 4}Q{x} {start} {x} {start + 4 * way}"
    back = f"V{end - 4 * way}Q{x} {end} {x + 4} {end}H{wide - 5}"
    return f'<path d="{out}{back}"/><path class="tip" d="M{wide} {end}l-6 -3.5v7z"/>'
