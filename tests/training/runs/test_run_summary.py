"""A run as one line of a list."""

import math
import os
import time
from itertools import pairwise
from pathlib import Path

from run_samples import entry_at, written

from torchhook import Finding, Report
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.schema import FILE
from torchhook.training.runs.summary import POINTS, summarize


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_a_list_shows_of_a_run(tmp_path):
    log = written(RunLog(tmp_path / "net"), range(3))
    warning, error = Finding("TH603", "warning", "it jumps", "fc"), Finding("TH201", "error", "it is dead", "relu", 1)
    for finding in (warning, error, Finding("TH202", "error", "it is dead, too", "relu", 1)):
        log.found(finding)
    log.write(Entry(7, time.time(), Snapshot({}), losses={5: math.nan, 7: 0.25}))
    running = summarize(tmp_path / "net")
    assert (running.name, running.model, running.state, running.error) == ("net", "Net", "running", "")
    assert running.last_step == 7 and running.last_loss == 0.25 and running.finding == error and running.findings == 3
    assert list(running.losses) == [0, 1, 2, 5, 7] and math.isnan(running.losses[5])
    log.end(Report(), "ended")
    ended = summarize(tmp_path / "net")
    with Run(tmp_path / "net") as run:
        assert (ended.state, ended.started, ended.size) == ("ended", run.started, run.size)
        assert ended.duration == run.ended - run.started
    time.sleep(0.01)
    assert summarize(tmp_path / "net") == ended  # while a running one grows older


def test_a_long_curve_is_thinned_to_what_fits_in_a_row(tmp_path):
    log = RunLog(tmp_path / "net")
    log.begin({})
    log.write(Entry(0, 0.0, Snapshot({}), losses={step: float(step) for step in range(20_000)}))
    found = summarize(tmp_path / "net").losses
    steps = list(found)
    assert len(steps) == POINTS and (steps[0], steps[-1]) == (0, 19_999)
    assert list(found.values()) == steps and max(b - a for a, b in pairwise(steps)) < 400


def test_a_run_that_cannot_be_read_says_why_and_nothing_stays_open(tmp_path):
    log = RunLog(tmp_path / "net")
    log.begin({})
    log.write(entry_at(0))
    log.end(Report(), "ended")
    (tmp_path / "net" / FILE).write_bytes((tmp_path / "net" / FILE).read_bytes()[:5000])
    os.utime(tmp_path / "net" / FILE, (1000, 1000))
    before = open_files()
    bad, gone = summarize(tmp_path / "net"), summarize(tmp_path / "gone")
    assert (bad.name, bad.state, bad.started) == ("net", "unreadable", 1000) and "is corrupt" in bad.error
    assert (gone.state, gone.started) == ("unreadable", 0) and "there is no run in" in gone.error
    assert open_files() == before
