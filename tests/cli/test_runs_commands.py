"""``torchhook runs``: list, show, export, prune."""

import csv
import json
import re
import time
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch
from torch import nn

from torchhook import Finding, Report
from torchhook.core.site import Site
from torchhook.integrations.agents import Questions
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog
from torchhook.training.runs.folders import new_folder
from torchhook.training.runs.schema import FILE

FOUND = Finding("TH201", "error", "61 % of the units never fire", "fc[bold]\x1b[31m", 3, hint="Warm up.")


@pytest.fixture
def root(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def run_in(root, name, *findings, state="ended"):
    folder = new_folder(root, name)
    log = RunLog(folder)
    log.begin({"model": name})
    for step in range(0, 6, 3):
        reduce = Reduce("moments")
        reduce.cell(Site("fc"), nn.Linear(1, 1)).update(torch.randn(10))
        losses = {step: 1 / (step + 1), step + 2: 0.2}  # of every step, and not of measured ones alone
        log.write(Entry(step, time.time(), reduce.snapshot(), losses=losses))
    for finding in findings:
        log.found(finding)
    if state:
        log.end(Report(findings, name), state)
    return folder


def test_lists_the_runs_on_a_line_each(command, root):
    run_in(root, "First", FOUND)
    time.sleep(0.01)
    running = run_in(root, "<Second>\x1b[31m\n", state=None)
    (root / "broken").mkdir()
    (root / "broken" / FILE).write_text("no database")
    done = command("runs", "list")
    header, *lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert header.split() == ["run", "model", "state", "started", "last", "step", "findings", "size"]
    broken, second, first = lines
    assert broken.split()[:2] == ["broken", "unreadable"]
    assert second.startswith(running.name) and "<Second>[31m" in second and " running " in second
    assert first.split()[1:3] == ["First", "ended"] and first.split()[-4:-2] == ["5", "1"] and "\x1b" not in done.out


def test_a_folder_without_runs_or_none_at_all(command, root):
    missing = command("runs", "list")
    assert missing.code == 2 and "there is no folder 'runs'" in missing.said
    root.mkdir()
    assert command("runs", "list") == (0, "There are no runs in runs.\n", "")


def test_shows_the_report_and_ends_as_it_says(command, root):
    bad, good = run_in(root, "Bad", FOUND), run_in(root, "Good")
    done = command("runs", "show", bad)
    assert (done.code, done.err) == (1, "")
    assert f"run      {bad}" in done.out and "state    ended" in done.out and "steps    0 to 5, 2 of them" in done.out
    assert "loss     1 to 0.2" in done.out and "FAILED  Bad: 1 error" in done.out and "> Warm up." in done.out
    assert "fc[bold][31m" in done.out and "\x1b" not in done.out
    for name in ("runs/latest", good / FILE, good):
        assert command("runs", "show", name).code == 0
    other = command("runs", "show", "runs")
    assert other.code == 2 and "there is no run in 'runs'" in other.said


def test_shows_what_is_known_of_a_run_that_was_killed_early(command, root):
    folder = run_in(root, "Net", FOUND, state=None)
    done = command("runs", "show", folder)
    assert done.code == 1 and "state    running" in done.out and "TH201" in done.out
    assert "the run has no report" in " ".join(done.out.split())


def test_other_forms_and_files(command, root, tmp_path):
    folder = run_in(root, "Net", FOUND)
    done = command("runs", "show", folder, "--format", "json", "--report", "report.md", "--report", "report.xml")
    assert json.loads(done.out)["findings"][0]["code"] == "TH201"
    assert "TH201" in (tmp_path / "report.md").read_text() and "TH201" in (tmp_path / "report.xml").read_text()
    refused = command("runs", "show", folder, "--report", "report.pdf")
    assert refused.code == 2 and "'report.pdf' must end in .html" in refused.said


def test_exports_a_table(command, root, tmp_path):
    run_in(root, "Net")
    assert command("runs", "export", "runs/latest", "--parquet", "run.parquet").out == "written: run.parquet, 2 rows\n"
    assert parquet.read_table(tmp_path / "run.parquet")["step"].to_pylist() == [0, 3]
    assert command("runs", "export", "runs/latest", "--csv", "run.csv").out == "written: run.csv, 2 rows\n"
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    columns = parquet.read_table(tmp_path / "run.parquet").to_pydict()
    streamed = command("runs", "export", "runs/latest", "--csv", "-")
    assert streamed.err == "written: 2 rows to standard output\n" and not (tmp_path / "-").exists()
    assert list(csv.DictReader(streamed.out.splitlines())) == rows
    assert list(rows[0]) == list(columns) and [row["path"] for row in rows] == ["fc", "fc"] == columns["path"]
    for name in ("step", "mean", "std", "count", "loss"):
        assert [float(row[name]) for row in rows] == columns[name]
    assert [row["rate"] for row in rows] == ["", ""] and columns["rate"] == [None, None]
    assert "say which file to write" in command("runs", "export", "runs/latest").said
    wrong = command("runs", "export", "runs/latest", "--parquet", "nowhere/run.parquet")
    assert wrong.code == 2 and "there is no folder 'nowhere'" in wrong.said


def test_prunes_only_when_told_twice(command, root):
    folders = []
    for name in ("A", "B", "C"):
        folders.append(run_in(root, name))
        time.sleep(0.01)
    (folders[0] / "model.pt").write_text("weights")
    running = run_in(root, "D", state=None)
    assert "say which runs to keep" in command("runs", "prune").said
    said = command("runs", "prune", "--keep", 1)
    assert said.code == 0 and all(folder.exists() for folder in folders)
    relative = [f"runs/{folder.name}" for folder in folders]
    assert said.out.splitlines() == [
        f"would remove: {relative[1]}",
        f"would remove: {relative[0]}",
        "Nothing was removed yet: add --yes.",
    ]
    done = command("runs", "prune", "--keep", 1, "--yes")
    assert done.out.splitlines() == [
        f"removed: {relative[1]}",
        f"removed, except for files that do not belong to the run: {relative[0]}",
    ]
    assert {path.name for path in root.iterdir()} == {folders[2].name, folders[0].name, running.name, "latest"}
    assert [path.name for path in folders[0].iterdir()] == ["model.pt"]
    assert command("runs", "prune", "--older-than", 30, "--yes").out == "There is nothing to remove.\n"


@pytest.mark.parametrize("name", ["", "list", "show", "export", "prune"])
def test_help_is_quick_and_fits(command, in_python, name):
    arguments = ["runs", *filter(None, [name]), "--help"]
    done = command(*arguments)
    assert done.code == 0 and all(len(line) <= 80 for line in done.out.splitlines()) and "[/" not in done.out
    if name in ("", "show"):
        lines = f"import sys; from torchhook.cli import main; sys.argv = ['torchhook', *{arguments!r}]\n"
        lines += "try: main()\nexcept SystemExit as ended: print(ended.code, 'torch' in sys.modules)"
        assert in_python(lines).out.splitlines()[-1] == "0 False"


def test_what_a_killed_start_left_is_listed_and_pruned(command, root):
    run = run_in(root, "Net")
    (root / "odd\n\x1b[31m").mkdir()
    (root / "odd\n\x1b[31m" / ".run.sqlite.4194999").touch()
    (root / "odd\n\x1b[31m" / ".run.sqlite.4194999-wal").touch()
    listed = command("runs", "list")
    assert listed.out.splitlines()[2].startswith("odd [31m/.run.sqlite.4194999 ") and "\x1b" not in listed.out
    assert "never began" in listed.out and "torchhook runs prune removes it" in listed.out
    said = command("runs", "prune", "--keep", "1")
    assert said.out == "would remove: runs/odd [31m/.run.sqlite.4194999\nNothing was removed yet: add --yes.\n"
    assert command("runs", "prune", "--keep", "1", "--yes").out == "removed: runs/odd [31m/.run.sqlite.4194999\n"
    assert {path.name for path in root.iterdir()} == {run.name, "latest"}


def test_a_run_without_any_step_has_no_last_step(command, root):
    log = RunLog(new_folder(root, "Net"))
    log.begin({"model": "Net"})
    line = command("runs", "list").out.splitlines()[1]
    assert re.search(r" running +20\d\d-\S+ \S+ +0 +\d", line), "0 findings, and no step"


def test_the_findings_that_are_counted_are_those_of_the_report(command, root):
    """A warning of the last check may not have been among those that were found on the way."""
    folder = run_in(root, "Net", state=None)
    log = RunLog(folder)
    log.begin({"model": "Net"})
    log.end(Report((Finding("TH601", "warning", "it stands still"),), "Net"), "ended")
    assert "1 warning" in command("why").out
    assert re.search(r" 5 +1 +\d", command("runs", "list").out.splitlines()[1])
    (row,) = Questions(root).list_runs().runs
    assert (row.errors, row.warnings) == (0, 1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_a_file_that_cannot_be_written_is_said_in_a_line(command, root):
    folder = run_in(root, "Net")
    done = command("runs", "export", folder, "--csv", "/dev/full")
    assert (done.code, done.err) == (2, "torchhook: cannot write /dev/full: No space left on device\n")
    done = command("runs", "export", folder, "--csv", "-")
    assert done.code == 0 and re.fullmatch(r"written: [\d,]+ rows to standard output\n", done.err)
