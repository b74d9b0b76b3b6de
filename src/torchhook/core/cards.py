"""The card of a finding, the same in a notebook, in the HTML report and on every page; and the box of a notebook."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from torchhook.core.text import printable

if TYPE_CHECKING:
    from torchhook.core.findings import Finding

STYLE = Path(__file__).with_name("card.css")


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

    >>> from torchhook.core.findings import Finding
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


def brief(finding: Finding) -> str:
    """A finding in one line."""
    return f"{text(finding.code)} {place(finding)} {text(finding.message)}"


def folded(summary: str, items: list[str]) -> str:
    """A list that is collapsed until it is clicked.

    >>> folded("2 more", ["a", "b"])
    '<details><summary>2 more</summary><ul><li>a</li><li>b</li></ul></details>'
    """
    return (
        f"<details><summary>{text(summary)}</summary><ul>{''.join(f'<li>{item}</li>' for item in items)}</ul></details>"
    )


def card(finding: Finding, anchor: str = "", evidence: str = "") -> str:
    """A finding: what and where, what to do, what was tried, the `evidence` as HTML, and what it explains."""
    step = "" if finding.step is None else f'<span class="quiet">step {finding.step}</span>'
    parts = [
        f'<p class="tags">{pill(finding.severity, finding.severity)}<b>{text(finding.code)}</b>{step}</p>',
        f"<h3>{text(finding.message)}</h3>",
        f'<p class="place">{place(finding)}</p>',
        f'<p class="hint">{text(finding.hint)}</p>' if finding.hint else "",
        f'<p class="tried">{text(str(finding.tried))}</p>' if finding.tried else "",
        evidence,
        folded(f"Explains {len(finding.affected)} more", list(map(brief, finding.affected)))
        if finding.affected
        else "",
    ]
    id_ = f' id="{anchor}"' if anchor else ""
    return f'<article class="card {finding.severity}"{id_}>{"".join(parts)}</article>'


def boxed(body: str) -> str:
    """The output of a notebook's cell: `body` in a box of its own style that fits the cell and scrolls inside."""
    return f'<div class="torchhook"><style>{_style()}</style>{body}</div>'


@cache
def _style() -> str:
    return STYLE.read_text(encoding="utf-8")
