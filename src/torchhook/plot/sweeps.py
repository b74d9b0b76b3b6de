"""The effect of each edit of a sweep on the metric: a bar for each site, or colours for site × position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from torchhook.edits.sweep import SweepRow
from torchhook.plot.style import (
    SMALL,
    colour_bar,
    colour_scale,
    legend_above,
    mark_cells,
    mark_odd,
    name_columns,
    name_layers,
    page,
    place,
    quiet,
    rows_page,
)
from torchhook.render.palette import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sweep(table: Sequence[SweepRow], *, tokens: Sequence[object] | None = None, ax: Axes | None = None) -> Figure:
    """The effect of each edit of a `torchhook.sweep`, or of some of its rows, on the metric; the first site is on top.

    With a clean run, it is the share of the metric that editing the site recovers: 1 is all of it. Otherwise it is the
    change of the metric compared with the run without an edit. A sweep with ``positions=True`` is drawn as site ×
    position, and `tokens` names the positions.

    >>> import torch, torchhook
    >>> model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()).eval()
    >>> found = torchhook.sweep(model, torch.ones(1, 2), ["0", "1"], torchhook.edits.scale(3.0), torch.sum)
    >>> [float(bar.get_width()) for bar in sweep(found).axes[0].patches]
    [4.0, 4.0]
    """
    rows = list(_rows(table))
    shares = [row.recovered for row in rows]
    has_clean = all(share is not None for share in shares)
    values = [math.nan if value is None else value for value in (shares if has_clean else [row.change for row in rows])]
    meaning = "recovered share" if has_clean else "change of the metric"
    if any(row.position is not None for row in rows):
        return _draw_positions(rows, values, meaning, tokens, ax)
    if tokens is not None:
        raise ValueError("tokens names positions, but the sweep has none: make it with positions=True")
    figure, ax = place(ax, *rows_page(len(rows)))
    name_layers(ax, _names(rows))
    up, down = ("recovers", "makes worse") if has_clean else ("increase", "decrease")
    for sign, colour, name in ((1, BLUE, up), (-1, ORANGE, down)):
        some = [(row, value) for row, value in enumerate(values) if math.isfinite(value) and sign * value > 0]
        if some:
            ax.barh([row for row, _ in some], [value for _, value in some], height=0.7, color=colour, label=name)
    mark_odd(ax, [row for row, value in enumerate(values) if not math.isfinite(value)], "not finite")
    for line in (0.0, 1.0) if has_clean else (0.0,):
        ax.axvline(line, color=GREY, linewidth=1)
    ax.set_xlabel(meaning)
    quiet(ax)
    legend_above(ax)
    return figure


def _draw_positions(
    rows: list[SweepRow], values: list[float], meaning: str, tokens: Sequence[object] | None, ax: Axes | None
) -> Figure:
    """Colours for site × position; positions that a site does not have, or without a finite effect, stand out."""
    sites = list(dict.fromkeys(row.site for row in rows))
    wide = 1 + max(row.position or 0 for row in rows)
    if tokens is not None and len(tokens) != wide:
        raise ValueError(f"tokens must have {wide} names, one per position, not {len(tokens)}")
    grid = torch.full((len(sites), wide), math.nan)
    has_run = torch.zeros(grid.shape, dtype=torch.bool)
    for row, value in zip(rows, values, strict=True):
        cell = sites.index(row.site), row.position or 0
        grid[cell], has_run[cell] = value, True
    known = grid[grid.isfinite()]
    scale = colour_scale(torch.cat([known, -known, known.new_zeros(1)]))  # zero is in the middle
    figure, ax = place(ax, *page((len(sites), wide), max(4.5, 0.35 * wide), beside=1.5))
    ax.imshow(grid.numpy(), norm=scale.norm, cmap=scale.cmap, interpolation="nearest", aspect="auto")
    name_layers(ax, _names(list({row.site: row for row in rows}.values())))
    odd = {"not finite": has_run & ~grid.isfinite(), "not measured": ~has_run, "negative": grid < 0}
    mark_cells(ax, odd, [column - 0.5 for column in range(wide + 1)])
    name_columns(ax, range(wide) if tokens is None else tokens)
    ax.set_xlabel("position", fontsize=SMALL)
    colour_bar(ax, scale, meaning)
    return figure


def _rows(table: Any) -> Sequence[SweepRow]:
    is_sweep = isinstance(table, Sequence) and all(isinstance(row, SweepRow) for row in table)
    if not is_sweep:
        raise TypeError(f"table must be the result of torchhook.sweep, or rows of it, not {table!r:.80}")
    if not table:
        raise ValueError("table is empty: the sweep had no sites")
    rows: Sequence[SweepRow] = table
    return rows


def _names(rows: Sequence[SweepRow]) -> list[str]:
    """The paths with their classes, and with the port if not all ports are the same."""
    several = len({row.site.port for row in rows}) > 1
    return [f"{row.place} {row.site.port}" if several else row.place for row in rows]
