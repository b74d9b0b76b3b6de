"""The findings of the HTML report as cards, with their evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchhook.core.cards import card, text
from torchhook.core.findings import Report
from torchhook.render.tags import cell


def cards(report: Report) -> str:
    """The findings of a report, as HTML.

    >>> from torchhook.core.findings import Finding
    >>> "<h3>61 % never fire</h3>" in cards(Report((Finding("TH201", "error", "61 % never fire"),)))
    True
    """
    if not report.findings:
        return '<p class="card nothing">Nothing found.</p>'
    return "".join(
        card(finding, f"finding-{number}", _evidence(finding.evidence))
        for number, finding in enumerate(report.findings, start=1)
    )


def _evidence(evidence: Mapping[str, Any]) -> str:
    if not evidence:
        return ""
    rows = "".join(f'<tr><th scope="row">{text(str(name))}</th>{cell(value)}</tr>' for name, value in evidence.items())
    return f'<table class="evidence"><caption>Evidence</caption><tbody>{rows}</tbody></table>'
