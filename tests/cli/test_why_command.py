"""``torchhook why``: what is wrong with a run and what to try next, for people and for programs."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn

from torchhook import Finding, Report, Trial, render
from torchhook.core.site import Site
from torchhook.core.text import printable
from torchhook.rules.history import Raised
from torchhook.stats.reduce import Reduce
from torchhook.training.ending import failure
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog, why
from torchhook.training.runs.folders import new_folder
from torchhook.training.runs.schema import FILE

EVIDENCE = {"module": "Linear", "cause": "rate", "ratio": 0.31}
BESIDES = Finding("TH601", "warning", "the loss does not fall", evidence={"cause": "rate"})
FOUND = Finding(
    "TH501", "error", "each step is too large\x1b[31m", "fc", 3, EVIDENCE, "Lower the rate.", affected=(BESIDES,)
)
DEAD = Finding("TH201", "warning", "61 % of the units never fire", "relu", 3, {"module": "ReLU"}, "Warm up.")


@pytest.fixture
def root(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def run_in(root, *findings, name="Net", state="ended", **facts):
    folder = new_folder(root, name)
    log = RunLog(folder)
    log.begin({"model": name})
    for step in (0, 3):
        reduce = Reduce("moments")
        reduce.cell(Site("fc"), nn.Linear(1, 1)).update(torch.randn(10))
        lines = {"fc": "net.py:41: x = self.fc(x)"}
        log.write(Entry(step, time.time(), reduce.snapshot(), losses={step: 1.0, step + 2: 1.0}, lines=lines))
    for finding in findings:
        log.found(finding)
    if state:
        log.end(Report(findings, name, checked=("TH201", "TH501"), **facts), state)
    return folder


def test_says_cause_evidence_place_and_the_next_experiment(command, root):
    folder = run_in(root, FOUND, DEAD)
    done = command("why")
    assert (done.code, done.err) == (1, "")
    assert done.out.splitlines() == [
        f"Net: 1 error, 1 warning, in runs/{folder.name}, ended at step 5",
        "",
        "error TH501  fc (Linear), step 3",
        "  each step is too large[31m",
        "  cause     rate",
        "  called    net.py:41: x = self.fc(x)",
        "  evidence  ratio=0.31",
        "  explains  TH601 at the model",
        "  next      Lower the rate.",
        "",
        "warning TH201 at relu (ReLU): 61 % of the units never fire",
    ]


def test_json_has_a_schema_and_all_findings(command, root):
    tried = Trial("a tenth of the learning rate", without=float("inf"), repaired=0.3, steps=50)
    folder = run_in(
        root, Finding("TH501", "error", "too large", "fc.weight", 3, EVIDENCE, "Lower it.", (), tried), DEAD
    )
    done = command("why", folder, "--json")
    said = json.loads(done.out)
    assert (done.code, done.err, said["schema"], said["ok"], said["state"]) == (1, "", 1, False, "ended")
    assert said["run"] == str(folder) and said["last_step"] == 5 and said["looked_at"]["measured_steps"] == 2
    first, second = said["findings"]
    assert first["cause"] == "rate" and first["module"] == "Linear" and first["evidence"] == {"ratio": 0.31}
    assert first["line"] == "net.py:41: x = self.fc(x)", "of the module that has the parameter"
    assert first["tried"]["without"] == "Infinity" and first["next"].startswith(
        "Train with this change: a tenth of the"
    )
    assert second["next"] == "Warm up." and second["line"] is None and second["tried"] is None
    with Run(folder) as run:
        assert run.why().to_dict()["findings"][0]["code"] == "TH501" and run.why().exit_code == 1


FAILED = """
import torch
from torchhook import Monitor

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)

def batch(step):
    if step == 12:
        raise OSError("shard 3\\nis damaged")
    return torch.randn(8, 4)

{before}
for step in range(25):
    loss = model(batch(step)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    {after}
"""
WATCHED = {"before": "monitor = Monitor(model, optimizer, every=2, price=None)", "after": "monitor.step(loss)"}


@pytest.mark.parametrize("how", ["run", "Monitor"])
def test_a_training_that_failed_says_with_what_and_where(command, root, tmp_path, how):
    script = tmp_path / "train.py"
    script.write_text(FAILED.format(**WATCHED if how == "Monitor" else dict.fromkeys(WATCHED, "")))
    words = ["-m", "torchhook", "run", "--ignore", "TH6"] if how == "run" else []
    done = subprocess.run([sys.executable, *words, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and "is damaged" in done.stderr
    done = command("why")
    line = 'train.py:10: raise OSError("shard 3\\nis damaged")'
    first, second, *_ = done.out.splitlines()
    assert (done.code, done.err) == (1, "") and first.endswith(", failed at step 11")
    assert second == f"raised    OSError: shard 3 is damaged, at {line}"
    said = json.loads(command("why", "--json").out)
    assert said["ok"] is False and said["findings"] == [] and said["state"] == "failed"
    assert said["error"] == {
        "type": "OSError",
        "message": "shard 3\nis damaged",
        "line": f"{tmp_path}/{line}",
    }
    shown = " ".join(command("runs", "show", "runs/latest").out.split())
    assert "unfinished Linear: nothing found" in shown and "failed with OSError: shard 3 is damaged, at" in shown


def test_of_code_without_a_file_there_is_no_text_of_the_line():
    try:
        exec("raise OSError('no data')", {})
    except OSError as error:
        assert failure(error)["line"] == Raised.of(error, 3).line == "<string>:1"


def test_a_healthy_run_says_what_was_looked_at(command, root):
    folder = run_in(root, skipped={"TH301": "no optimizer"})
    done = command("why", "runs")
    assert done == (
        0,
        f"Net: nothing found, in runs/{folder.name}, ended at step 5\n2 rules checked in 2 measured steps, 1 skipped\n",
        "",
    )
    assert json.loads(command("why", "--json").out)["findings"] == []


def test_one_step_is_no_steps():
    assert "checked in 1 measured step," in str(
        why.Why("net", "ended", 0, 1, Report(skipped={"TH301": "no optimizer"}))
    )


SCHEMA = json.loads(Path(render.__file__).with_name("why.schema.json").read_text())


@pytest.mark.parametrize("state", ["ended", "failed", "running"])
def test_json_is_as_its_schema_says(command, root, state):
    tried = Trial("a tenth of the learning rate", without=float("inf"), repaired=0.3, steps=50)
    error = {"type": "OSError", "message": "no data", "line": ""}
    found = Finding("TH501", "error", "too large", "fc.weight", 3, EVIDENCE, "Lower it.", (BESIDES,), tried)
    facts = {"skipped": {"TH301": "no optimizer"}, "about": {"error": error}, "notes": ("a note",)}
    run_in(root, found, DEAD, state=None if state == "running" else state, **facts)
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    said = json.loads(command("why", "--json").out)
    jsonschema.validate(said, SCHEMA, jsonschema.Draft202012Validator)
    assert said["schema"] == SCHEMA["properties"]["schema"]["const"] == why.SCHEMA
    assert {*said} == {*SCHEMA["required"]} and {*said["findings"][0]} == {*SCHEMA["$defs"]["finding"]["required"]}


def test_what_cannot_be_printed_is_escaped(command, root):
    odd = "\ud800\x1b[31m\x9b\u202e"
    folder = run_in(root, Finding("TH501", "error", odd, "fc", 3, {"cause": [odd], odd: odd}, odd))
    folder.rename(root / os.fsdecode(b"odd\xff\x1b]0;title\x07 $(date)"))
    done = command("why", root, "--json")
    (found,) = json.loads(done.out)["findings"]
    assert (done.code, done.err) == (1, "") and not re.search("[\x1b\x9b\ud800\u202e]", done.out)
    assert found["message"] == found["next"] == odd and found["evidence"] == {odd: odd}
    (folder,) = root.glob("odd*")
    (folder / FILE).write_bytes(b"SQLite format 3\0" * 99)
    done = command("why", folder)
    assert done.code == 2 and "\x1b" not in done.err and "\x07" not in done.err
    assert f"`sqlite3 '{printable(str(folder))}/run.sqlite' .recover` may" in done.err, "which is safe to paste"


def test_exit_codes_are_those_of_diagnose(command, root, tmp_path):
    folder = run_in(root, DEAD)
    assert command("why", folder).code == 0 and command("why", folder, "--fail-on", "warning").code == 1
    (tmp_path / "pyproject.toml").write_text('[tool.torchhook]\nfail-on = "warning"\n')
    assert command("why", folder).code == 1 and command("why", folder, "--fail-on", "error").code == 0
    assert command("why", "nowhere").code == 2 and command("why", folder, "--fail-on", "horror").code == 2
    (tmp_path / "empty").mkdir()
    assert "there are no runs in 'empty'" in command("why", "empty").said


def test_the_newest_run_with_and_without_a_link(command, root):
    run_in(root, FOUND, name="Old")
    time.sleep(0.01)
    new = run_in(root, name="New", state=None)
    for _ in range(2):
        done = command("why")
        assert done.code == 0 and f"New: nothing found, in runs/{new.name}, running at step 5" in done.out
        assert "the run has no report" in done.out
        (root / "latest").unlink(missing_ok=True)
    (new / FILE).write_text("no database")
    passed = command("why")
    assert passed.code == 1 and passed.out.startswith("Old: 1 error")
    assert passed.err.startswith(f"torchhook: skipped 'runs/{new.name}': 'run.sqlite' is not")
    broken = command("why", new)
    assert broken.code == 2 and "is not a run, or is corrupt" in broken.said


def test_a_run_that_was_killed_before_its_first_check_is_checked_now(command, root, monkeypatch):
    log = RunLog(new_folder(root, "Net"))
    log.begin({"model": "Net"})
    for step in range(3):
        reduce = Reduce("moments")
        reduce.cell(Site("fc"), nn.Linear(1, 1)).update(torch.tensor([1.0, torch.nan if step == 2 else 2.0]))
        log.write(Entry(step, time.time(), reduce.snapshot()))
    assert "nothing was checked so far" in command("why").out
    monkeypatch.setattr("torchhook.training.runs.run.is_gone", lambda owner: True)
    done = command("why")
    assert done.code == 1 and "killed at step 2" in done.out and "error TH101  fc (Linear), step 2" in done.out
    assert "what it recorded was checked now" in done.out
    assert "TH101" in command("runs", "show", log.folder).out


@pytest.mark.parametrize("state", ["running", "killed", "unwritten"])
def test_a_run_that_has_not_ended_or_is_not_whole_has_not_passed(command, root, monkeypatch, state):
    folder = run_in(root, state="unwritten" if state == "unwritten" else None)
    if state == "killed":
        monkeypatch.setattr("torchhook.training.runs.run.is_gone", lambda owner: True)
    shown = command("runs", "show", folder).out
    assert "unfinished  Net: nothing found" in shown and "passed" not in shown
    is_cut = "the run could not be written to its end, so it is not known what came later"
    for said in (shown, command("why", folder).out, command("why", folder, "--json").out):
        assert (is_cut in " ".join(said.split())) == (state == "unwritten")


def test_many_long_findings_fit_a_screen(command, root):
    long = "words " * 200
    many = [Finding("TH501", "error", long, f"fc{n}", n, {f"n{n}": n for n in range(99)}, long) for n in range(40)]
    run_in(root, *many, notes=(long,) * 50)
    done = command("why")
    lines = done.out.splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 100 and "and 34 more" in done.out
    assert len(json.loads(command("why", "--json").out)["findings"]) == 40
