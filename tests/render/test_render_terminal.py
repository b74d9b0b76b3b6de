"""The terminal: exact text at a fixed width, colours only where they are wanted."""

import io
import json
import sys

import pytest
import report_samples
from rich.cells import cell_len
from rich.console import Console

from torchhook import Finding, Report, render
from torchhook.render.to_json import from_json

SICK = """\
FAILED  ResNet: 1 error, 1 warning, 1 info

error TH101  layer3.1.bn, step 240
  The first value that is not finite comes from here: 312 of
  65,536 are NaN, yet all inputs are finite
  nan=312  inf=0  numel=65536  largest_input=6.27e+04
  dtype=float16
  explains TH102 at layer4.0.conv, TH102 at layer4.0.bn,
  TH102 at layer4.1.conv and 2 more
  > The largest input is at 96 % of what float16 can hold.
  Use bfloat16, or lower the learning rate.

warning TH403  fc.weight, step 180
  A step moves the weight by 41 % of its size
  update_ratio=0.41  healthy=1e-05, 0.03
  > Lower the learning rate of this group, or warm up.
  tried: learning rate a tenth → loss 0.31 instead of 2.28
  after 100 steps

info TH501  the model
  The loss at step 0 is what guessing gives
  loss=2.31  ln_classes=2.303

21 rules checked, 3 skipped
  TH502, TH503: no validation loss was given
  TH504: no labels were given
note: Gradients are those before clipping.
"""


def printed(report, verbose=False, **options):
    file = io.StringIO()
    render.terminal(report, Console(file=file, _environ={}, **options), verbose=verbose)
    return file.getvalue()


def test_a_report_in_sixty_columns():
    assert printed(report_samples.sick(), verbose=True, width=60) == SICK


def test_skipped_rules_are_counted_unless_asked_for():
    said = printed(report_samples.sick(), width=60)
    assert "21 rules checked, 3 skipped\nnote: Gradients" in said and "no labels were given" not in said


def test_the_header_says_where_it_comes_from_and_a_failed_training_has_not_passed():
    about = {"run": "runs/net", "started": "2026-01-02 03:04:05", "device": "cpu", "versions": {"torch": "2.13"}}
    report = Report(model="Net", about={**about, "command": "train.py --fast", "state": "failed"})
    first, *header, _, _ = printed(report, width=80).splitlines()
    assert first == "unfinished  Net: nothing found"
    assert header == ["runs/net, 2026-01-02 03:04:05, cpu", "torch 2.13", "$ train.py --fast"]
    for form in (render.html, render.markdown):
        assert "runs/net, 2026-01-02 03:04:05, cpu" in form(report) and "--fast" in form(report)
    assert "unfinished" in render.html(report) and "passed" not in render.html(report).split("<body")[1]
    assert "✅" not in render.markdown(report)
    assert from_json(render.json(report)) == report
    old = json.loads(render.json(report))
    del old["about"]
    assert from_json(json.dumps(old)) == Report(model="Net"), "reports from before it had a header can be read"


def test_the_class_is_beside_the_path():
    found = Finding("TH201", "error", "dead", "3", evidence={"module": "ReLU", "share": 0.6})
    report = Report((Finding("TH204", "error", "constant", "5", 2, {"module": "Linear"}, affected=(found,)),))
    said = printed(report, width=80)
    assert (
        "error TH204  5 (Linear), step 2\n" in said and "explains TH201 at 3 (ReLU)" in said and "module=" not in said
    )
    assert "<code>5</code> (Linear)" in render.html(report) and "<code>3</code> (ReLU)" in render.html(report)
    assert "<code>5</code> (Linear), step 2" in render.markdown(report) and "TH201 at 3 (ReLU)" in render.markdown(
        report
    )
    assert "TH204 error: 5 (Linear), step 2: constant\n  explains TH201 at 3 (ReLU)" in str(report)


def test_several_consequences_at_one_place_are_named_once():
    parts = tuple(Finding("TR101", "error", f"{name} differs", "0", 2) for name in ("weight", "bias", "scale"))
    elsewhere = Finding("TR101", "error", "weight differs", "2", 2)
    report = Report((Finding("TR102", "error", "gradients differ", "0", 1, affected=(*parts, elsewhere)),))
    assert "explains TR101 at 0, TR101 at 2\n" in printed(report, width=80)
    assert str(report).endswith("explains TR101 at 0, TR101 at 2")


@pytest.mark.parametrize("width", [60, 80, 100, 160, 200])
@pytest.mark.parametrize("name", ["sick", "hostile", "large"])
def test_no_line_is_wider_than_the_terminal_or_ends_in_spaces(name, width):
    lines = printed(getattr(report_samples, name)(), width=width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


def test_colours_in_a_terminal_alone():
    coloured = printed(report_samples.sick(), width=60, force_terminal=True, color_system="standard")
    assert "\x1b[1;31mFAILED\x1b[0m" in coloured and "\x1b[1;33mwarning TH403" in coloured
    assert "\x1b" not in printed(report_samples.sick(), width=60)
    assert "\x1b" not in printed(report_samples.hostile(), width=60)
    quiet = printed(report_samples.sick(), width=60, force_terminal=True, no_color=True)
    assert "31m" not in quiet


def test_no_color_is_respected(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    render.terminal(report_samples.sick())
    assert "\x1b[1;31m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    render.terminal(report_samples.sick())
    assert "31m" not in capsys.readouterr().out


def test_standard_output_by_default(capsys):
    render.terminal(report_samples.healthy())
    assert capsys.readouterr().out == "passed  ResNet: nothing found\n\n25 rules checked\n"


def test_a_narrow_encoding_is_no_reason_to_fail():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    render.terminal(report_samples.large(findings=1).passing("info"), Console(file=file, width=60))
    render.terminal(report_samples.Report(model="Né×t"), Console(file=file, width=60))
    file.seek(0)
    assert "N??t: nothing found" in file.read()


def test_without_rich_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[cli\]"'):
        render.terminal(report_samples.healthy())
