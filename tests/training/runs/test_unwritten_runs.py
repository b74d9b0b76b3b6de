"""A run that could not be written, or not to its end, says so; by disks that are really full or read-only."""

import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Timer

import pytest
import torch
from run_samples import written
from torch import nn

from torchhook import Monitor, Report
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.folders import clear, leftovers, summaries
from torchhook.training.runs.summary import summarize

HERE = Path(__file__).parent


@contextmanager
def disk(folder, *options):
    """A disk of its own, in memory."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("mounting a disk is not permitted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder, run):
    while summarize(run).last_step != 15:
        time.sleep(0.01)
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))


def trained(root, at_twenty=lambda run: None, pause=0):
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Monitor(model, optimizer, every=5, price=None, to=root) as monitor:
        for step in range(40):
            if step == 20:
                at_twenty(monitor.run)
            time.sleep(pause)
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8)).pow(2).mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def last_line(said):
    *_, line = said.strip().splitlines()
    assert line.startswith("torchhook: ") and "dashboard" not in line and "in /" not in line
    return line


def test_a_disk_that_fills_up(tmp_path, capfd):
    with disk(tmp_path / "disk", "size=1m") as root:
        with pytest.warns(UserWarning, match=r"cannot be written \(database or disk is full\)"):
            monitor = trained(root, lambda run: fill(root, run))
        assert last_line(capfd.readouterr().err).endswith(
            "; the run could not be written from step 20 on: database or disk is full"
        )
        (run,) = summaries(root)
        assert (run.state, run.last_step, run.error) == ("unwritten", 15, "")
        assert "run" not in monitor.report.about and str(monitor.run) not in repr(monitor)


def test_a_disk_that_is_too_small_for_the_beginning(tmp_path, capfd):
    with disk(tmp_path / "disk", "size=16k") as root:
        with pytest.warns(UserWarning, match="the run is lost"):
            trained(root)
        assert "the run could not be written from step 0 on: " in last_line(capfd.readouterr().err)
        (run,) = summaries(root)
        assert run.state == "unwritten" and abs(run.started - time.time()) < 60
        assert run.error.startswith("the run in ") and "could not be written" in run.error
        (left,) = leftovers(root)
        assert left.name == "unwritten"
        clear(left)
        assert list(root.iterdir()) == []


@pytest.mark.parametrize("size", ["180k", "208k", "240k", "288k"])
def test_a_disk_that_has_room_for_little_more_than_the_tables(tmp_path, capfd, size):
    with disk(tmp_path / "disk", f"size={size}") as root:
        with pytest.warns(UserWarning, match=r"cannot be written \(database or disk is full\)"):
            monitor = trained(root)
        said = re.fullmatch(r".*from step (\d+) on: database or disk is full", last_line(capfd.readouterr().err))
        with Run(monitor.run) as run:
            assert run.state == "unwritten" and max(run.steps, default=-5) + 5 == int(said[1])


def test_a_disk_that_has_room_again(tmp_path, capfd):
    def fill_for_a_while(run):
        fill(root, run)
        Timer(0.5, (root / "filler").unlink).start()

    with disk(tmp_path / "disk", "size=1m") as root:
        with pytest.warns(UserWarning, match=r"cannot be written \(database or disk is full\)"):
            monitor = trained(root, fill_for_a_while, pause=0.05)
        *_, line = capfd.readouterr().err.strip().splitlines()
        with Run(monitor.run) as run:
            written = [step for step in run.steps if step >= 20]
            assert run.state == "ended" and written and written[0] > 20
        assert f"; the run has a gap from step 20 to {written[0]}: database or disk is full → torchhook" in line


def test_a_disk_that_is_read_only(tmp_path, capfd):
    with disk(tmp_path / "disk", "size=1m", "ro") as root:
        with pytest.warns(UserWarning, match="no run is recorded"):
            trained(root)
        assert last_line(capfd.readouterr().err).endswith("; the run could not be written: Read-only file system")


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["y" * 200] * 25)])
def test_a_path_that_is_too_long(tmp_path, capfd, path):
    with pytest.warns(UserWarning, match="no run is recorded") as warned:
        monitor = trained(tmp_path / path)
    assert len(str(warned[0].message)) < 400
    assert last_line(capfd.readouterr().err).endswith("; the run could not be written: File name too long")
    assert "run" not in monitor.report.about


@pytest.mark.slow
def test_files_that_may_not_grow(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "limited_run.py", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0
    assert re.search("; the run could not be written from step 20 on: disk I/O error$", last_line(done.stderr))
    (run,) = summaries(tmp_path)
    assert (run.state, run.last_step, run.error) == ("unwritten", 15, "")


@pytest.fixture
def lost(tmp_path, monkeypatch):
    """A run of which nothing could be written, beside room for a reason."""

    def full(file):
        raise sqlite3.OperationalError("database or disk is full")

    written(RunLog(tmp_path / "runs" / "before"), range(3)).end(Report(model="Net"), "ended")
    with monkeypatch.context() as patched, pytest.warns(UserWarning, match="the run is lost"):
        patched.setattr("torchhook.training.runs.database.create", full)
        return trained(tmp_path / "runs").run


def test_one_that_could_not_be_written_at_all_is_listed_with_its_date_and_reason(lost, command):
    name, reason = lost.name, "could not be written from step 0 on: database or disk is full"
    (line,) = (line for line in command("runs", "list", lost.parent).out.splitlines() if name in line)
    assert re.search(rf" unwritten +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +the run in .*{reason}", line)
    found = command("why", lost)
    assert found.code == 2 and reason in found.said
    found = command("why", lost.parent)
    assert found.code == 0 and found.err.startswith(f"torchhook: skipped '{lost}': ") and reason in found.said
    (lost / "unwritten").write_text("notes of my own")
    assert lost.name not in command("runs", "list", lost.parent).out
