"""The tables of HTML pages: modules and parameters of a report, with links to their findings; those of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchhook.core.cards import code, text
from torchhook.core.findings import Report
from torchhook.core.parts import Table
from torchhook.render.tags import cell

Layer = Mapping[str, Any]
Links = Mapping[str, list[str]]

COLUMNS = {
    "module": "class",
    "shape": "shape",
    "mean": "mean",
    "std": "std",
    "min": "min",
    "max": "max",
    "nonfinite": "not finite",
    "zero_fraction": "share of zeros",
    "norm": "norm",
    "grad_norm": "gradient norm",
    "update_ratio": "update ratio",
}

ROWS = 2000  # of a table of a result
_WORDS = ("module", "shape")


def tables(report: Report) -> str:
    """The layers of a report, as HTML tables.

    >>> "<h3>Modules</h3>" in tables(Report(layers=({"site": "fc", "kind": "module", "mean": 0.1},)))
    True
    """
    links = _links(report)
    kinds = {"Modules": "module", "Parameters": "parameter"}
    return "".join(
        _table(title, [row for row in report.layers if row["kind"] == kind], links) for title, kind in kinds.items()
    )


def _links(report: Report) -> dict[str, list[str]]:
    """Links to the findings, by site."""
    links: dict[str, list[str]] = {}
    for number, finding in enumerate(report.findings, start=1):
        links.setdefault(finding.site, []).append(f'<a href="#finding-{number}">{text(finding.code)}</a>')
    return links


def _table(title: str, layers: Sequence[Layer], links: Links) -> str:
    if not layers:
        return ""
    keys = [key for key in COLUMNS if any(layer.get(key) is not None for layer in layers)]
    header = "".join(f'<th scope="col" class="{"" if key in _WORDS else "number"}">{COLUMNS[key]}</th>' for key in keys)
    rows = "".join(_row(layer, keys, links) for layer in layers)
    table = f'<table><thead><tr><th scope="col">site</th>{header}</tr></thead><tbody>{rows}</tbody></table>'
    return f"<h3>{title}</h3>{_scrolling(title, table)}"


def listed(table: Table) -> str:
    """A table of a result, as HTML.

    >>> listed(Table(["path", "error"], [["<fc>", 0.5]])).count("<td")
    2
    """
    kinds = ["number" if table.is_number(column) else "" for column in range(len(table.header))]
    names = zip(kinds, table.header, strict=True)
    header = "".join(f'<th scope="col" class="{kind}">{text(name)}</th>' for kind, name in names)
    rows = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in table.rows[:ROWS])
    more = len(table.rows) - ROWS
    left_out = f'<p class="quiet">and {more:,} more rows: .table() has all</p>' if more > 0 else ""
    body = f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"
    return _scrolling(text(table.title), body) + left_out


def _scrolling(name: str, table: str) -> str:
    """A box that scrolls, which must have a name and be reachable by keyboard."""
    return f'<div class="scroll" role="region" aria-label="{name}" tabindex="0">{table}</div>'


def _row(layer: Layer, keys: Sequence[str], links: Links) -> str:
    site = " ".join([code(layer["site"]), *links.get(layer["site"], [])])
    return f'<tr><th scope="row">{site}</th>{"".join(cell(layer.get(key)) for key in keys)}</tr>'
