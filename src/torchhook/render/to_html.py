"""The HTML report: one self-contained page that opens from disk and makes no network requests."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from torchhook.core.cards import pill, text
from torchhook.core.findings import Report, Severity
from torchhook.core.parts import Bars, Matrix, Part, Picture, Sentence, Table
from torchhook.core.result import Result
from torchhook.render.cards import cards
from torchhook.render.figures import activations, gradient_flow, loss_curve, updates
from torchhook.render.figures.results import caption, drawn
from torchhook.render.figures.style import SCRIPT
from torchhook.render.tables import listed, tables
from torchhook.render.words import by_reason, counts, header, heading, left_out, scope, span, verdict

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


_SECTIONS: dict[type, str] = {
    Sentence: "Remarks",
    Report: "Findings",
    Picture: "Figure",
    Bars: "Figure",
    Matrix: "Figure",
}


def html(result: Report | Result) -> str:
    """A report or another result as one HTML page, including its style sheet, its plots and the script that draws them.

    >>> page = html(Report(model="<Net>"))
    >>> "<h1>&lt;Net&gt;</h1>" in page, "Nothing found" in page, "https:" in page
    (True, True, False)
    """
    if isinstance(result, Report):
        parts = {
            "Findings": cards(result),
            "Plots": plots(result),
            "Layers": tables(result),
            "Checks": _checks(result),
        }
        return document(result.headline, _title(result), parts, verdict(result))
    kind, title = heading(result._kind()), result._title()
    header = f'<p class="quiet">torchhook</p><h1>{text(kind)}</h1><p>{text(title)}</p>'
    return document(f"{kind}: {title}", header, _by_title(result._parts()), "plain", needs_script=True)


def _by_title(parts: Sequence[Part]) -> dict[str, str]:
    """Parts of a result as HTML, by title; the first sentence, which is the title of the page, is left out."""
    found: dict[str, str] = {}
    for part in parts[1:]:
        section = part.title if isinstance(part, Table) else _SECTIONS[type(part)]
        found[section] = found.get(section, "") + _part(part)
    return found


def _part(part: Part) -> str:
    if isinstance(part, Sentence):
        return f"<p>{text(part.text)}</p>"
    if isinstance(part, Report):
        return cards(part)
    if isinstance(part, Table):
        return listed(part)
    if isinstance(part, Picture):
        return f'<p class="card"><img class="drawn" alt="{text(part.title)}" src="{part.address()}"></p>'
    return plot(part.title, drawn(part), caption(part))


def document(title: str, header: str, parts: Mapping[str, str], kind: str, needs_script: bool = False) -> str:
    """A page with a section for each part that is not empty; `kind` is the class of its body.

    `needs_script` adds the script that draws figures, if a part does not have it already.

    >>> page = document("Net", "<h1>Net</h1>", {"Plots": "", "Layers": "<p>two</p>"}, "passed")
    >>> '<section id="layers"><h2>Layers</h2>' in page, "Plots" in page
    (True, False)
    """
    filled = {name: (_anchor(name), body) for name, body in parts.items() if body}
    sections = "\n".join(
        f'<section id="{anchor}"><h2>{text(name)}</h2>\n{body}</section>' for name, (anchor, body) in filled.items()
    )
    links = "".join(f'<a href="#{anchor}">{text(name)}</a>' for name, (anchor, _) in filled.items())
    script = _script() if needs_script else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{text(title)}</title>
<link rel="icon" href="data:,">
<style>
{STYLE.read_text(encoding="utf-8")}</style>
{script}
</head>
<body class="{kind}">
<header>
{header}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{sections}
</main>
</body>
</html>
"""


def _title(report: Report) -> str:
    found = [severity for severity in reversed(Severity) if report.count(severity)]
    pills = [pill(str(severity), count) for severity, count in zip(found, counts(report).split(", "), strict=False)]
    judged = verdict(report)
    colour = "warning" if judged == "unfinished" else judged
    worse = "" if report.fail_on == Severity.ERROR else " or worse"
    return (
        f'<p class="quiet">torchhook report</p><h1>{text(report.model)}</h1>'
        f'<p class="tags">{pill(f"verdict {colour}", judged)}{"".join(pills)}</p>'
        f'<p class="quiet">{scope(report)}, failing on {report.fail_on}{worse}</p>'
    ) + "".join(f'<p class="quiet">{text(line)}</p>' for line in header(report))


def plots(report: Report, more: Mapping[str, tuple[Any, str]] | None = None) -> str:
    """The plots that have something to show, after the script that draws them; nothing at all without a plot.

    `more` are figures of your own, by name, each with a caption.
    """
    drawn = {
        name: (draw(report), caption if draw is loss_curve else f"{caption} {span(report)}")
        for name, (draw, caption) in PLOTS.items()
    }
    figures = [
        plot(name, figure, caption)
        for name, (figure, caption) in (drawn | dict(more or {})).items()
        if figure is not None
    ]
    return f"{_script()}\n{''.join(figures)}" if figures else ""


def plot(name: str, figure: Any, caption: str, beside: str = "") -> str:
    """A figure on a card, under its name and caption; needs the script that draws it. `beside` goes to its left."""
    own = {"div_id": f"plot-{_anchor(name)}", "config": {"displayModeBar": False, "responsive": True}}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, auto_play=False, **own)
    body = f'<div role="img" aria-label="{text(name)}">{drawn}</div>'
    if beside:
        body = f'<div class="pair">{beside}{body}</div>'
    title = f'<figcaption><h3>{text(name)}</h3><p class="quiet">{text(caption)}</p></figcaption>'
    return f'<figure class="card">{title}{body}</figure>\n'


def _script() -> str:
    return f"<script>{SCRIPT.read_text(encoding='utf-8')}</script>"


def _anchor(name: str) -> str:
    """An id for a name: readable if it is made of plain words, else a digest, since it may be a path from outside."""
    plain = name.lower().replace(" ", "-")
    return plain if re.fullmatch("[a-z_-]+", plain) else sha256(name.encode(errors="surrogatepass")).hexdigest()[:12]


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
        "Skipped": skipped and f"<details><summary>{left_out(report)}</summary><dl>{skipped}</dl></details>",
        "Notes": notes and f"<ul>{notes}</ul>",
    }
    return "".join(f"<h3>{name}</h3>{body}" for name, body in lists.items() if body)
