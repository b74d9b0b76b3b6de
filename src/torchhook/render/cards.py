"""The findings of the HTML report as cards: what and where, what to do, what was tried, evidence, what it explains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchhook.core.findings import Finding, Report
from torchhook.render.tags import cell, folded, pill, place, text


def cards(report: Report) -> str:
    """The findings of a report, as HTML.

    >>> "<h3>61 % never fire</h3>" in cards(Report((Finding("TH201", "error", "61 % never fire"),)))
    True
    """
    if not report.findings:
        return '<p class="card nothing">Nothing found.</p>'
    return "".join(_card(number, finding) for number, finding in enumerate(report.findings, start=1))


def _card(number: int, finding: Finding) -> str:
    step = "" if finding.step is None else f'<span class="quiet">step {finding.step}</span>'
    parts = [
        f'<p class="tags">{pill(finding.severity, finding.severity)}<b>{text(finding.code)}</b>{step}</p>',
        f"<h3>{text(finding.message)}</h3>",
        f'<p class="place">{place(finding)}</p>',
        f'<p class="hint">{text(finding.hint)}</p>' if finding.hint else "",
        f'<p class="tried">{text(str(finding.tried))}</p>' if finding.tried else "",
        _evidence(finding.evidence),
        folded(f"Explains {len(finding.affected)} more", list(map(_brief, finding.affected)))
        if finding.affected
        else "",
    ]
    return f'<article class="card {finding.severity}" id="finding-{number}">{"".join(parts)}</article>'


def _brief(finding: Finding) -> str:
    return f"{text(finding.code)} {place(finding)} {text(finding.message)}"


def _evidence(evidence: Mapping[str, Any]) -> str:
    if not evidence:
        return ""
    rows = "".join(f'<tr><th scope="row">{text(str(name))}</th>{cell(value)}</tr>' for name, value in evidence.items())
    return f'<table class="evidence"><caption>Evidence</caption><tbody>{rows}</tbody></table>'
