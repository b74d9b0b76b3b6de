"""Files: the format by suffix, whole or not at all; and what importing the package costs."""

import subprocess
import sys
from pathlib import Path

import pytest
import report_samples

from torchhook import render
from torchhook.core.findings import Report


@pytest.mark.parametrize(
    "suffix, start", [(".html", "<!doctype"), (".json", "{"), (".xml", "<?xml"), (".md", "##"), (".JSON", "{")]
)
def test_the_suffix_says_the_format(tmp_path, suffix, start):
    path = tmp_path / "deep" / f"report{suffix}"
    render.save(report_samples.sick(), path)
    assert path.read_text().startswith(start)
    assert path.read_bytes().endswith(b"\n")
    assert list(path.parent.iterdir()) == [path]


def test_another_suffix_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'report.pdf': the suffix must be one of \.html, \.json, \.md, \.xml, \.th"):
        render.save(Report(), tmp_path / "report.pdf")
    with pytest.raises(ValueError, match="'report.xml': only .th and .json can be read back"):
        render.load(tmp_path / "report.xml")


def test_saved_and_loaded(tmp_path):
    report = report_samples.healthy()
    render.save(report, str(tmp_path / "report.json"))
    assert render.load(str(tmp_path / "report.json")) == report


@pytest.mark.parametrize("suffix", [".html", ".json", ".xml", ".md"])
def test_any_name_can_be_written(tmp_path, suffix):
    render.save(report_samples.hostile(), tmp_path / f"report{suffix}")
    (tmp_path / f"report{suffix}").read_text(encoding="utf-8")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    render.save(Report(model="old"), path)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        render.save(Report(model="new"), path)
    assert render.load(path).model == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_names_are_functions():
    assert render.__all__ == sorted(render.__all__)
    assert all(callable(getattr(render, name)) for name in render.__all__)


def test_importing_needs_neither_plotly_nor_rich():
    script = "import sys, torchhook.render, torchhook.render.figures; print({'plotly', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
