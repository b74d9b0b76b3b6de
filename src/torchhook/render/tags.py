"""The cells of HTML tables. Every name from the outside goes through `text`."""

from __future__ import annotations

import math
from typing import Any

from torchhook.core.cards import text as text
from torchhook.render.words import shown


def cell(value: Any) -> str:
    """A cell of a table: numbers are right-aligned, NaN and infinity stand out, None is a dash.

    >>> cell(0.5), cell(math.nan)
    ('<td class="number">0.5</td>', '<td class="number broken">NaN</td>')
    """
    if value is None:
        return '<td class="number"><span class="quiet">–</span></td>'
    if isinstance(value, (int, float)):
        return f'<td class="number{"" if math.isfinite(value) else " broken"}">{shown(value)}</td>'
    return f"<td>{text(shown(value))}</td>"
