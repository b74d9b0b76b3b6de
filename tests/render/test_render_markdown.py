"""Markdown for the summary of a job: a table whose cells stay cells, and never too long."""

import re

import report_samples
from hypothesis import given
from markdown_it import MarkdownIt
from test_render_json import reports

from torchhook import render
from torchhook.core.findings import Finding, Report

PARSER = MarkdownIt("commonmark", {"html": True}).enable("table")


def rows(text):
    return re.findall(r"<tr>\s*<td>.*?</tr>", PARSER.render(text), re.S)


def test_the_headline_the_table_and_what_is_folded():
    text = render.markdown(report_samples.sick())
    assert text.startswith("## ❌ ResNet: 1 error, 1 warning, 1 info\n")
    assert len(rows(text)) == 3
    assert "<summary>TH101 at layer3.1.bn explains 5 more</summary>" in text
    skipped = "- Skipped TH502, TH503: no validation loss was given"
    assert skipped not in text and skipped in render.markdown(report_samples.sick(), verbose=True)


def test_what_was_tried_is_in_the_cell_of_what_to_do():
    text = render.markdown(report_samples.sick())
    assert "or warm up. tried: learning rate a tenth → loss 0.31 instead of 2.28 after 100 steps |\n" in text


def test_nothing_found_has_no_table():
    text = render.markdown(report_samples.healthy())
    assert text.startswith("## ✅ ResNet: nothing found\n") and "|" not in text


def test_names_are_neither_markup_nor_cells():
    text = render.markdown(report_samples.hostile())
    page = PARSER.render(text)
    assert len(rows(text)) == 2
    assert all(row.count("<td>") == 5 for row in rows(text))
    assert "<script" not in page and "<img" not in page and "<em>" not in page
    assert "&lt;script&gt;" in page


def test_underscores_stay():
    page = PARSER.render(render.markdown(Report((Finding("TH1", "info", "__init__ of *x* [a](b) `c`", "a__b__c"),))))
    assert "__init__ of *x* [a](b) `c`" in page and "<code>a__b__c</code>" in page


def test_it_always_fits_a_job_summary():
    long = "é|<&" * 300
    finding = Finding("TH1", "error", long, long, hint=long, affected=(Finding("TH2", "info", long, long),) * 60)
    report = Report((finding,) * 300, skipped={f"TH{n}": f"{n} {long}" for n in range(500)}, notes=(long,) * 500)
    text = render.markdown(report, verbose=True)
    assert 500_000 < len(text.encode()) < 2**20
    table, folds, rest = re.split(r"(?<=more)\n\n", re.sub(r"<details>.*?</details>", "<fold>", text, flags=re.S))
    for part, item, total in ((table, "| ❌", 300), (folds, "<fold>", 300), (rest, "- ", 1000)):
        left_out = int(re.search(r"^… and (\d+) more$", part, re.M)[1])
        assert len(re.findall(rf"^{re.escape(item)}", part, re.M)) + left_out == total, item


@given(reports)
def test_any_report_has_a_row_a_finding(report):
    assert len(rows(render.markdown(report))) == len(report.findings)
