"""Similarity matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchhook.plot.arrays import ARRAY, finite, numbers, share_below
from torchhook.plot.style import SMALL, colour_bar, colours, inches, mark_cells, name_columns, name_rows, page, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NUMBERED = 12  # rows or columns up to which the cells show their numbers
_CELL = 0.3  # inches that a number needs


def similarity(
    matrix: Any,
    rows: Sequence[object] | None = None,
    columns: Sequence[object] | None = None,
    *,
    unit: str = "",
    ax: Axes | None = None,
) -> Figure:
    """A matrix as colours, from 0 to 1, or from -1 to 1 if any value is negative; a small one shows its numbers, too.

    Args:
        matrix: What `torchhook.compare.cka` returned, whose layers name rows and columns; or numbers in [0, 1] or
            [-1, 1], such as correlations. Larger numbers extend the scale.
        rows, columns: Their names; by default they are numbered.
        unit: What the numbers are, beside the scale.

    >>> figure = similarity([[1.0, 0.2], [0.2, 1.0]], rows=["conv", "fc"])
    >>> [text.get_text() for text in figure.axes[0].texts]
    ['1.00', '0.20', '0.20', '1.00']
    """
    row_title, column_title = "row", "column"
    if _is_likeness(matrix):
        rows, columns, unit = rows or matrix.rows, columns or matrix.columns, unit or matrix.by
        row_title, column_title = ("layer", "layer") if matrix.itself else ("layer of a", "layer of b")
        matrix = matrix.matrix
    given = numbers(matrix, "matrix", f"{ARRAY}, or what torchhook.compare.cka returned")
    found = finite(given)
    if found.dim() != 2 or not found.numel():
        raise ValueError(f"matrix must be rows × columns, not of shape {list(found.shape)}: pass a single matrix")
    high, wide = found.shape
    row_names, column_names = _names(rows, high, "rows"), _names(columns, wide, "columns")
    figure, ax = place(ax, *page((high, wide), max(4.5, 0.5 * min(wide, _NUMBERED)), beside=1.5))
    most, signed = max(1.0, share_below(found.abs(), 1.0)), bool((found < 0).any())
    low = -most if signed else 0.0
    drawn = ax.imshow(found.numpy(), interpolation="nearest", cmap=colours(signed), vmin=low, vmax=most)
    name_rows(ax, row_names)
    name_columns(ax, column_names)
    ax.set_ylabel(row_title, fontsize=SMALL)
    ax.set_xlabel(column_title, fontsize=SMALL)
    across, along = inches(ax)
    odd = {"not finite": ~given.isfinite(), "negative": found < 0}
    if max(found.shape) <= _NUMBERED and min(across / wide, along / high) >= _CELL:
        _write_numbers(ax, drawn)
        odd.pop("negative")  # the numbers say so
    mark_cells(ax, odd, [column - 0.5 for column in range(wide + 1)])
    colour_bar(ax, drawn, unit)
    return figure


def _is_likeness(value: Any) -> bool:
    """Whether it is a result of `torchhook.compare.cka`, as far as a plot needs it."""
    return all(hasattr(value, name) for name in ("matrix", "rows", "columns", "by", "itself"))


def _names(given: Sequence[object] | None, count: int, what: str) -> Sequence[object]:
    if given is not None and len(given) != count:
        raise ValueError(f"{what} must have {count} names to fit the matrix, not {len(given)}")
    return range(count) if given is None else given


def _write_numbers(ax: Axes, drawn: Any) -> None:
    """Write the number of each cell into it, in black or white, depending on its colour."""
    values = drawn.get_array()
    colour = drawn.to_rgba(values)
    for row, line in enumerate(values.tolist()):
        for column, value in enumerate(line):
            red, green, blue, _ = colour[row, column]
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            number = "NaN" if value is None or value != value else f"{round(value, 2) + 0.0:.2f}"  # not -0.00
            ax.text(column, row, number, color="white" if dark else "black", fontsize=SMALL, ha="center", va="center")
