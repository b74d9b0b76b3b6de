"""Nothing grows: the memory and the open files of a long training, and of a long list of runs."""

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from torchhook import Monitor, Report
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.folders import find, latest, leftovers, prunable, summaries
from torchhook.training.runs.schema import FILE

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def resident():
    """The memory of this process, in MiB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def test_memory_and_files_are_the_same_after_20000_steps(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    x = torch.randn(4, 4)
    found = []
    with Monitor(model, optimizer, every=10, price=None, to=tmp_path, max_bytes=2**20) as monitor:
        for step in range(1, 20_001):
            optimizer.zero_grad(set_to_none=True)
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
            if step % 5000 == 0:
                found.append((resident(), open_files()))
    with Run(monitor.run) as run:
        assert run.last_step == 19_999 and not monitor.unwritten
    (early, _), *_, (late, _) = found
    assert late - early < 12, found
    assert max(files for _, files in found) - min(files for _, files in found) <= 2, found


@pytest.fixture
def runs(tmp_path):
    """2,000 runs; each is a file of its own name, and all of them take the room of one."""
    log = RunLog(tmp_path / "one")
    log.begin({"model": "Net"})
    log.write(Entry(0, 0.0, Snapshot({}), losses={step: 1 / (step + 1) for step in range(1000)}))
    log.end(Report(), "ended")
    for number in range(2000):
        folder = tmp_path / "runs" / f"net-{number:04}"
        folder.mkdir(parents=True)
        os.link(tmp_path / "one" / FILE, folder / FILE)
    return tmp_path / "runs"


@pytest.fixture
def few_files():
    """At most 64 files more than now may be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 64, hard))  # noqa: PTH208
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_files")
def test_2000_runs_are_listed_with_few_open_files_and_little_memory(runs, command):
    assert len(command("runs", "list", runs).out.splitlines()) == 2001
    before, memory = open_files(), resident()
    for _ in range(2):
        found = summaries(runs)
        assert len(found) == 2000 and {run.error for run in found} == {""} and found[0].last_step == 999
        del found
    assert len(find(runs)) == 2000 and len(prunable(runs, keep=1)) == 1999 and leftovers(runs) == []
    assert latest(runs) == runs / "net-1999"
    assert open_files() == before and resident() - memory < 12
