"""The terminal: exact text at a fixed width, colours only where they are wanted."""

import io
import sys

import pytest
import report_samples
from rich.cells import cell_len
from rich.console import Console

from torchhook import render

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


def printed(report, **options):
    file = io.StringIO()
    render.terminal(report, Console(file=file, _environ={}, **options))
    return file.getvalue()


def test_a_report_in_sixty_columns():
    assert printed(report_samples.sick(), width=60) == SICK


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
