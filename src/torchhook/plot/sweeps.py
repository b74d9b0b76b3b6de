"""The effect of each edit of a sweep on the metric."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchhook.edits.sweep import SweepRow
from torchhook.plot.style import legend_above, mark_odd, name_layers, place, quiet, rows_page
from torchhook.render.palette import BLUE, GREY, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def sweep(table: Sequence[SweepRow], *, ax: Axes | None = None) -> Figure:
    """The effect of each edit of a `torchhook.sweep`, or of some of its rows, on the metric; the first site is on top.

    With a clean run, it is the share of the metric that editing the site recovers: 1 is all of it. Otherwise it is the
    change of the metric compared with the run without an edit.

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
    figure, ax = place(ax, *rows_page(len(rows)))
    name_layers(ax, _names(rows))
    up, down = ("recovers", "makes worse") if has_clean else ("increase", "decrease")
    for sign, colour, name in ((1, BLUE, up), (-1, ORANGE, down)):
        some = [(row, value) for row, value in enumerate(values) if math.isfinite(value) and sign * value > 0]
        if some:
            ax.barh([row for row, _ in some], [value for _, value in some], height=0.7, color=colour, label=name)
    mark_odd(ax, [row for row, value in enumerate(values) if not math.isfinite(value)], "x", 1.0, "not finite")
    for line in (0.0, 1.0) if has_clean else (0.0,):
        ax.axvline(line, color=GREY, linewidth=1)
    ax.set_xlabel("recovered share" if has_clean else "change of the metric")
    quiet(ax)
    legend_above(ax)
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
    """The paths, with the port if not all ports are the same."""
    several = len({row.site.port for row in rows}) > 1
    return [f"{row.site.path} {row.site.port}" if several else row.site.path for row in rows]
