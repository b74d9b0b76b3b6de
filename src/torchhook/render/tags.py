"""Pieces of HTML that the parts of the report share. Every name from the outside goes through `text`."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from torchhook.core.findings import Finding
from torchhook.render.words import printable, shown


def text(value: str) -> str:
    """`value` escaped, for an element or a quoted attribute.

    >>> text("<script>")
    '&lt;script&gt;'
    """
    return html.escape(printable(value))


def code(name: str) -> str:
    """The name of a site.

    >>> code("layer1.0")
    '<code>layer1.0</code>'
    """
    return f"<code>{text(name)}</code>" if name else "the model"


def place(finding: Finding) -> str:
    """The site of a finding, with the class of its module.

    >>> place(Finding("TH201", "error", "61 % never fire", "3", evidence={"module": "ReLU"}))
    '<code>3</code> (ReLU)'
    """
    return f"{code(finding.site)}{f' ({text(finding.module)})' if finding.module else ''}"


def pill(kind: str, words: str) -> str:
    """A word in the colour of its kind: a severity, ``passed`` or ``failed``.

    >>> pill("error", "2 errors")
    '<span class="pill error">2 errors</span>'
    """
    return f'<span class="pill {kind}">{text(words)}</span>'


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


def folded(summary: str, items: Sequence[str]) -> str:
    """A list that is collapsed until it is clicked.

    >>> folded("2 more", ["a", "b"])
    '<details><summary>2 more</summary><ul><li>a</li><li>b</li></ul></details>'
    """
    return (
        f"<details><summary>{text(summary)}</summary><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul></details>"
    )
