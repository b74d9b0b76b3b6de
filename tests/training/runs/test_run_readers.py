"""Others read while one writes: no error, no part of a window, nothing that was seen goes back."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from run_samples import entry_at, written

from torchhook import Report
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.schema import FILE

HERE = Path(__file__).parent


@pytest.mark.slow
def test_two_processes_read_while_one_writes_and_thins(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "reading_while_writing.py", tmp_path / "run"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    looks = [int(number) for number in re.findall(r"looked (\d+) times", done.stdout)]
    left, largest = map(int, re.search(r"left are (\d+) steps, at most (\d+) bytes", done.stdout).groups())
    assert len(looks) == 2 and min(looks) > 2
    assert 50 < left < 400 and largest <= 2**20  # of 600: it was thinned meanwhile


def test_who_reads_slowly_does_not_make_the_log_grow(tmp_path):
    log = written(RunLog(tmp_path / "run", max_bytes=2**20), range(20))
    with Run(tmp_path / "run") as run:
        windows = run.windows()
        next(windows)  # and then he thinks for a while
        for step in range(20, 400):
            log.write(entry_at(step % 40, sites=("a", "b")))
        assert (tmp_path / "run" / f"{FILE}-wal").stat().st_size < 2**18
        assert len(list(windows)) == 19


def test_what_ends_while_it_is_read_can_be_read_by_others(tmp_path):
    log = written(RunLog(tmp_path / "run"), range(3))
    with Run(tmp_path / "run") as early:
        assert early.state == "running"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.end(Report(model="Net"), "ended")
        with Run(tmp_path / "run") as late:
            assert early.state == late.state == "ended" and early.steps == late.steps == [0, 1, 2]
