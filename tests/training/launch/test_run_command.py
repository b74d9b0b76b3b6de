"""``torchhook run``: what it asks the watch for, what it tells in the end, and what it does if something fails."""

import io
import json
import os
import re
import subprocess
import sys
import textwrap
from functools import partialmethod

import pytest

from torchhook.cli import main
from torchhook.cli.run import _printed
from torchhook.core.findings import Report
from torchhook.training.launch import discovery
from torchhook.training.launch.script import Script

TRAINING = """
    import os, sys, torch
    from torch import nn

    class First(nn.Linear):
        pass

    class Second(nn.Linear):
        pass

    def train(net, steps=30):
        optimizer = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    for name in sys.argv[1:]:
        train(globals()[name](4, 2))
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    print("trained")
"""


@pytest.fixture
def told(tmp_path, monkeypatch, capfd):
    """Run the command in this process: its exit code, and what it wrote."""
    monkeypatch.chdir(tmp_path)
    for name in ("argv", "path", "excepthook"):
        value = getattr(sys, name)
        monkeypatch.setattr(sys, name, [*value] if isinstance(value, list) else value)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)

    def run(*arguments, script="print('trained')"):
        (tmp_path / "train.py").write_text(textwrap.dedent(script))
        sys.argv = ["torchhook", "run", *arguments]
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capfd.readouterr()

    return run


class Fake:
    """A watch that sees what it is told to."""

    asked, ends, watched, is_main = {}, [], [], True

    def __init__(self, **asked):
        type(self).asked = asked

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.ends.append(error[1])


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(discovery, "Discovery", Fake)
    Fake.ends.clear()
    return Fake


def test_every_model_is_told_of_and_where_its_run_lies(told, tmp_path):
    code, out, err = told("--report", "it.json", "--every", "5", "train.py", "First", "Second", script=TRAINING)
    assert (code, out) == (0, "trained\n")
    first, second = err.split("\n\npassed  Second: ")
    assert first.startswith("\npassed  First: ")
    assert "written: it.json\n" in first and "written: it-2.json\n" in second
    line = "torchhook: nothing found in 30 steps → torchhook dashboard runs/train-"
    assert f"\n{line}" in first and f"\n{line}Second-" in second and err.count("→") == 2
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["it-2.json", "it.json"]
    assert len([path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]) == 2
    assert not any((tmp_path / "elsewhere").iterdir())


NEVER_STEPS = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(200):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).square().mean().backward()
    {step}
"""


BY_HAND = "[parameter.data.sub_(0.1 * parameter.grad) for parameter in model.parameters()]"


@pytest.mark.parametrize(("step", "found"), [("", True), ("optimizer.step()", False), (BY_HAND, False)])
def test_an_optimizer_that_never_steps_is_found(told, tmp_path, step, found):
    _, _, err = told("--report", "it.json", "train.py", script=NEVER_STEPS.format(step=step))
    findings = json.loads((tmp_path / "it.json").read_text())["findings"]
    assert (("TH503", "loop") in [(one["code"], one["evidence"]["cause"]) for one in findings]) == found
    assert ("optimizer.step() is never called" in err) == found


def test_nothing_trained_is_said_in_a_line(told):
    code, out, err = told("train.py", script="import torch\ntorch.nn.Linear(2, 2)(torch.ones(2))")
    assert (code, out) == (0, "")
    assert err == (
        "torchhook: nothing was trained here: no optimizer took a step, and nothing changed between two backwards."
        " Trainings in child processes are not seen.\n"
    )


UNPRINTABLE = """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")

raise Odd
"""


@pytest.mark.parametrize(
    "script, how",
    [
        ("raise ValueError('two\\nlines')", "failed (ValueError: two) before it imported torch"),
        ("assert False", "failed (AssertionError) before it imported torch"),
        (UNPRINTABLE, "failed (Odd: <exception str() failed>) before it imported torch"),
        ("raise SystemExit('no data')", "failed (no data) before it imported torch"),
        ("import torch\n1 / 0", "failed (ZeroDivisionError: division by zero) before an optimizer took a step"),
    ],
)
def test_a_script_that_failed_first_says_so_and_how(told, monkeypatch, script, how):
    if "import torch" not in script:
        monkeypatch.setattr(Script, "run", partialmethod(_without_torch, Script.run))
    _, _, err = told("train.py", script=script)
    assert err.splitlines()[-1] == f"torchhook: the script {how}, so nothing was trained."


def _without_torch(script, run, on_torch):
    """Run a script as if this process had not imported torch."""
    return run(script, lambda: None)


def test_skipped_rules_are_for_who_asks(told):
    trains, _, _ = TRAINING.partition("    os.mkdir")
    _, _, plain = told("train.py", "First", script=trains)
    _, _, verbose = told("--verbose", "train.py", "First", script=trains)
    assert "TH901" not in plain and re.search(r"\d+ rules checked, \d+ skipped\n", plain)
    assert "TH901: needs a stored profile" in verbose


def test_one_of_several_processes_speaks(told, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert told("train.py") == (0, "trained\n", "")


def test_what_it_asks_for(told, fake, tmp_path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.torchhook]\nignore = ["TH202"]\n[tool.torchhook.per-module-ignores]\n"head.*" = ["TH201"]\n'
    )
    told("train.py")
    assert fake.asked == {
        "every": 10,
        "price": 0.02,
        "rules": None,
        "ignore": ("TH202",),
        "per_module": {"head.*": ["TH201"]},
        "to": tmp_path / "runs",
        "name": "train",
        "on_finding": None,
    }
    more = ["--every", "3", "--price", "0.5%", "--rules", "th1,TH2", "--select", "TH4"]
    more += ["--ignore", "TH201", "--ignore", "TH202"]
    told(*more, "--to", "kept", "--name", "mine", "--stop-on-error", "train.py", "--every", "7")
    assert fake.asked == {
        "every": 3,
        "price": 0.005,
        "rules": ("TH1", "TH2", "TH4"),
        "ignore": ("TH201", "TH202"),
        "per_module": {"head.*": ["TH201"]},
        "to": tmp_path / "kept",
        "name": "mine",
        "on_finding": "stop",
    }


def test_the_watch_is_told_how_it_ended(told, fake):
    told("train.py")
    told("train.py", script="raise SystemExit(3)")
    told("train.py", script="1 / 0")
    assert [type(error).__name__ for error in fake.ends] == ["NoneType", "SystemExit", "ZeroDivisionError"]


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--select", "TH999", "train.py"], "there is no rule 'TH999'"),
        (["--ignore", "nonsense", "train.py"], "there is no rule 'nonsense'"),
        (["nowhere.py"], "torchhook: cannot open 'nowhere.py': No such file or directory"),
        (["-m", "nowhere"], "torchhook: No module named nowhere"),
        (["."], "can't find '__main__' module in"),
        ([], "Missing argument 'SCRIPT'"),
        (["--report", "it.txt", "train.py"], "'it.txt' must end in .html, .json, .md, .xml"),
        (["--to", "train.py", "train.py"], "'train.py' is a file"),
        (["--every", "0", "train.py"], "should be greater than or equal to 1"),
        (["--nonsense", "train.py"], "No such option: --nonsense"),
    ],
)
def test_what_is_used_wrongly_ends_with_2_before_anything_runs(told, arguments, why):
    code, out, err = told(*arguments)
    assert (code, out) == (2, "")
    assert why in " ".join(err.replace("│", " ").split())


def test_codes_of_a_project_are_looked_at_too(told, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.torchhook.per-module-ignores]\nhead = ["TH999"]\n')
    code, out, err = told("train.py")
    assert (code, out) == (2, "") and "there is no rule 'TH999'" in err


def test_a_fault_of_ours_does_not_stop_the_script(told, fake, monkeypatch):
    monkeypatch.setattr(fake, "__enter__", lambda self: 1 / 0)
    code, out, err = told("train.py", script="print('trained'); raise SystemExit(3)")
    assert (code, out) == (3, "trained\n")
    assert err.startswith("torchhook: nothing was watched: ZeroDivisionError")


def test_a_report_that_fails_does_not_change_how_the_script_ended(told, fake, monkeypatch):
    class Broken:
        @property
        def report(self):
            raise RuntimeError("no report")

    monkeypatch.setattr(fake, "watched", [Broken()])
    code, out, err = told("train.py", script="print('trained'); raise SystemExit(3)")
    assert (code, out) == (3, "trained\n")
    assert err.startswith("torchhook: the report failed: RuntimeError: no report")


def test_a_fault_is_shown_in_full_to_who_asks_for_it(told, fake, monkeypatch):
    monkeypatch.setenv("TORCHHOOK_TRACEBACK", "1")
    monkeypatch.setattr(fake, "__exit__", lambda self, *error: 1 / 0)
    code, _, err = told("train.py")
    assert code == 0 and "Traceback" in err and "in _finish" in err


def test_who_interrupts_the_end_gets_no_report(told, fake, monkeypatch):
    def interrupted(self, *error):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake, "__exit__", interrupted)
    assert told("train.py", script="print('trained'); raise SystemExit(3)") == (3, "trained\n", "")


def test_colours_are_for_where_it_is_said(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for file, coloured in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "__stderr__", file)
        assert ("\x1b" in _printed(Report(model="Net"))) is coloured
        assert file.getvalue() == ""


def test_in_a_process_of_its_own(tmp_path):
    """Codes are looked at when torch is imported; what a fork of the script imports and trains is not watched."""
    forks = f"import os, sys\nif os.fork():\n    os.wait()\n    sys.exit(4)\n{textwrap.dedent(TRAINING)}"
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    (tmp_path / "forks.py").write_text(forks)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "torchhook", "run", *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = run("--select", "TH999", "train.py", "First")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("torchhook: there is no rule 'TH999'") and done.stderr.count("\n") == 1
    done = run("forks.py", "First")
    assert (done.returncode, done.stdout) == (4, "trained\n")
    assert done.stderr.count("\n") == 1 and "failed with exit code 4 before it imported torch" in done.stderr
    assert not (tmp_path / "runs").exists()
