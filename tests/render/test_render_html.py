"""The page as text: whole in itself, every name escaped, readable colours. How it looks is tested in a browser."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_samples
from hypothesis import given, settings
from test_render_json import reports

from torchhook import render
from torchhook.core.findings import Finding, Report
from torchhook.render.palette import LINES, PAGES

CSS = Path(render.__file__).with_name("page.css").read_text()
VOID = {"meta", "link", "br", "img"}


class Outline(HTMLParser):
    """The tags of a page; fails where one is closed that is not open."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.headings, self.links, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append(tag)
        self.links += [given["href"]] if tag == "a" else []
        self.ids += [given["id"]] if "id" in given else []
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        assert not any(name.startswith("on") for name in given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_parts_in_their_order():
    page = render.html(report_samples.sick())
    outline = Outline(page)
    assert [name for name in outline.ids if "-" not in name] == ["findings", "plots", "layers", "checks"]
    assert all(deeper <= level + 1 for level, deeper in zip(outline.headings, outline.headings[1:], strict=False))
    assert {link[1:] for link in outline.links} <= set(outline.ids)
    assert "<title>ResNet: 1 error, 1 warning, 1 info</title>" in page
    assert page.count("plotly.js (cartesian - minified) v") == 1


def test_a_page_without_data_to_plot_has_no_script():
    page = render.html(Report((Finding("TH1", "error", "x"),), checked=("TH1",)))
    assert "script" not in Outline(page).tags and len(page) < 20_000


def test_nothing_outside_is_referred_to():
    page = render.html(Report((Finding("TH1", "error", "x"),)))
    assert "http" not in page.replace("http-equiv", "") and "url(" not in page and "@import" not in page


def test_hostile_names_are_text():
    report = report_samples.hostile()
    plain = Report(report.findings, report.model, checked=report.checked, skipped=report.skipped, notes=report.notes)
    outline = Outline(render.html(plain))
    assert not {"script", "img"} & set(outline.tags)
    assert outline.tags.count("style") == 1


@settings(max_examples=20, deadline=None)
@given(reports)
def test_any_report_is_a_page(report):
    page = render.html(Report(report.findings, report.model, skipped=report.skipped, notes=report.notes))
    assert "script" not in Outline(page).tags
    render.html(report)


def test_the_same_report_gives_the_same_page():
    assert render.html(report_samples.sick()) == render.html(report_samples.sick())


def test_plots_of_layers_say_which_steps_they_are_of():
    report = replace(report_samples.healthy(), span=(100, 195))
    assert render.html(report).count("Measured from step 100 to step 195.") == 3  # not the loss
    assert "measured steps" not in render.html(report_samples.healthy())


def test_skipped_rules_are_folded():
    page = render.html(report_samples.sick())
    folded = page.partition("<h3>Skipped</h3><details><summary>3 rules</summary>")[2].partition("</details>")[0]
    assert "no validation loss was given" in folded and page.count("no validation loss was given") == 1


def test_severity_is_said_in_words():
    page = render.html(report_samples.sick())
    assert '<span class="pill error">error</span>' in page and '<span class="pill verdict failed">failed</span>' in page


def test_what_was_tried_follows_what_to_do():
    page = render.html(report_samples.sick())
    tried = '<p class="tried">tried: learning rate a tenth → loss 0.31 instead of 2.28 after 100 steps</p>'
    assert page.count(f"or warm up.</p>{tried}") == page.count('class="tried"') == 1


def test_without_plotly_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[plot\]"'):
        render.html(report_samples.healthy())
    assert "Nothing found" in render.html(Report())


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read(theme):
    themes = re.findall(r":root \{(.*?)\}", CSS, re.S)
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+);", colours)) for colours in themes)
    colours = light | (dark if theme == "dark" else {})
    for ink in ("ink", "quiet", "link"):
        assert min(contrast(colours[ink], colours[ground]) for ground in ("paper", "card")) >= 4.5, ink
    for kind in ("error", "warning", "info", "good"):
        tint = mixed(colours[kind], colours["card"], 0.16)
        assert contrast(colours[f"{kind}-ink"], tint) >= 4.5, kind
        assert contrast(colours[f"{kind}-ink"], colours["card"]) >= 4.5, kind


def test_lines_are_seen_in_the_dark():
    _, paper = PAGES["dark"]
    assert min(contrast(colour, paper) for colour in LINES) >= 3


def mixed(hue, ground, share):
    parts = [round(share * int(hue[i : i + 2], 16) + (1 - share) * int(ground[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{part:02x}" for part in parts)


def contrast(one, other):
    """WCAG's ratio."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
