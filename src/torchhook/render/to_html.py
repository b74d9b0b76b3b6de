"""The HTML report: one self-contained page that opens from disk and makes no network requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchhook.core.findings import Report, Severity
from torchhook.render.cards import cards
from torchhook.render.figures import activations, gradient_flow, loss_curve, updates
from torchhook.render.figures.style import SCRIPT
from torchhook.render.tables import tables
from torchhook.render.tags import pill, text
from torchhook.render.words import by_reason, counts, scope, span

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
STYLE = Path(__file__).with_name("page.css")

PLOTS = {
    "Loss": (loss_curve, "Loss by step. Diamonds mark steps with findings."),
    "Gradient flow": (gradient_flow, "Layers in execution order, on a log scale. A level line is healthy."),
    "Activations": (
        activations,
        "Layers in execution order. The standard deviation should neither vanish nor explode with depth.",
    ),
    "Updates": (updates, "The healthy band, 1e-5 to 3e-2, is shaded. Diamonds are outside it."),
}


def html(report: Report) -> str:
    """A report as one HTML page, including its style sheet, its plots and the script that draws them.

    >>> page = html(Report(model="<Net>"))
    >>> "<h1>&lt;Net&gt;</h1>" in page, "Nothing found" in page, "https:" in page
    (True, True, False)
    """
    parts = {"Findings": cards(report), "Plots": _plots(report), "Layers": tables(report), "Checks": _checks(report)}
    filled = {name: body for name, body in parts.items() if body}
    sections = "\n".join(
        f'<section id="{name.lower()}"><h2>{name}</h2>\n{body}</section>' for name, body in filled.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(report.headline)}</title>
<link rel="icon" href="data:,">
<style>
{STYLE.read_text(encoding="utf-8")}</style>
</head>
<body class="{_verdict(report)}">
<header>
{_title(report)}
<nav aria-label="Sections">{"".join(f'<a href="#{name.lower()}">{name}</a>' for name in filled)}</nav>
</header>
<main>
{sections}
</main>
</body>
</html>
"""


def _verdict(report: Report) -> str:
    return "passed" if report.ok else "failed"


def _title(report: Report) -> str:
    found = [severity for severity in reversed(Severity) if report.count(severity)]
    pills = [pill(str(severity), count) for severity, count in zip(found, counts(report).split(", "), strict=False)]
    verdict = _verdict(report)
    worse = "" if report.fail_on == Severity.ERROR else " or worse"
    return (
        f'<p class="quiet">torchhook report</p><h1>{text(report.model)}</h1>'
        f'<p class="tags">{pill(f"verdict {verdict}", verdict)}{"".join(pills)}</p>'
        f'<p class="quiet">{scope(report)}, failing on {report.fail_on}{worse}</p>'
    )


def _plots(report: Report) -> str:
    """The plots that have something to show, after the script that draws them; nothing at all without a plot."""
    drawn = {
        name: (draw(report), caption if draw is loss_curve else f"{caption} {span(report)}")
        for name, (draw, caption) in PLOTS.items()
    }
    figures = [
        f'<figure class="card"><figcaption><h3>{name}</h3><p class="quiet">{caption}</p></figcaption>'
        f'<div role="img" aria-label="{name}">{_figure(figure, name)}</div></figure>\n'
        for name, (figure, caption) in drawn.items()
        if figure is not None
    ]
    return f"<script>{SCRIPT.read_text(encoding='utf-8')}</script>\n{''.join(figures)}" if figures else ""


def _figure(figure: Any, name: str) -> str:
    own = {"div_id": f"plot-{name.lower().replace(' ', '-')}", "config": {"displayModeBar": False, "responsive": True}}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, **own))


def _checks(report: Report) -> str:
    """The rules that were checked, those that were skipped with the reason, and the notes."""
    checked = "".join(f"<li>{text(code)}</li>" for code in report.checked)
    skipped = "".join(
        f"<dt>{text(', '.join(codes))}</dt><dd>{text(reason)}</dd>"
        for reason, codes in by_reason(report.skipped).items()
    )
    notes = "".join(f"<li>{text(note)}</li>" for note in report.notes)
    lists = {
        "Checked": checked and f'<ul class="codes">{checked}</ul>',
        "Skipped": skipped and f"<dl>{skipped}</dl>",
        "Notes": notes and f"<ul>{notes}</ul>",
    }
    return "".join(f"<h3>{name}</h3>{body}" for name, body in lists.items() if body)
