"""Two processes read a run in every way while a third writes and thins it: ``python reading_while_writing.py FOLDER``.

They are forked, for torch takes long to import. What goes wrong in a reader is printed, and it ends with 1.
"""

import os
import sys
import traceback
from pathlib import Path

import torch
from run_samples import entry_of, snapshot_at, states_of

from torchhook import Finding, Report
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog

STEPS = 600
SNAPSHOTS = [snapshot_at(number, sites=[f"layer{site}" for site in range(40)]) for number in range(8)]
STATES = [states_of(snapshot) for snapshot in SNAPSHOTS]


def look(run, held):
    """Read everything; what was seen before may be thinned out, but the newest step never goes back."""
    steps = run.steps
    assert not steps or steps[-1] >= held
    for number, (step, snapshot) in enumerate(run.windows(most=8)):
        if number % 3 == 0:
            assert states_of(snapshot) == STATES[step % 8]
    series = run.series("mean", most=200)
    assert series.values.shape == (len(series.paths), len(series.steps)) and not series.values.isnan().any()
    assert sum(len(block.steps) for block in run.blocks(most=50)) <= 100  # there are two ports
    assert run.state == "running" and run.model == "Net" and len(run.history(4).windows) <= 4
    assert {finding.code for finding in run.findings} <= {"TH201"}
    _ = run.losses, run.rates, run.times, run.report, run.samples, run.places, run.size, repr(run), run._repr_html_()
    return steps[-1] if steps else 0


def read(folder, keep_open):
    """Look again and again, with one connection or always a new one, until all is written."""
    held = times = 0
    while held < STEPS - 1:
        with Run(folder) as run:
            held, times = look(run, held), times + 1
            while keep_open and held < STEPS - 1:
                held, times = look(run, held), times + 1
    print(f"looked {times} times", flush=True)


def forked(folder, keep_open):
    reader = os.fork()
    if not reader:
        try:
            read(folder, keep_open)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return reader


def main(folder):
    torch.set_num_threads(1)
    log = RunLog(folder, max_bytes=2**20)
    log.begin({"model": "Net"})
    readers = [forked(folder, True), forked(folder, False)]
    largest = 0
    for step in range(STEPS):
        entry = entry_of(step, SNAPSHOTS[step % 8])
        log.write(entry if step % 10 else Entry(**{**vars(entry), "maps": {"conv": torch.rand(2, 8, 8)}}))
        if step % 7 == 0:
            log.found(Finding("TH201", "error", "x", site=str(step % 50), step=step))
            log.keep(Report(model="Net"), step)
        largest = max(largest, sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()))
    for reader in readers:
        os.waitpid(reader, 0)
    with Run(folder) as run:
        print(f"left are {len(run.steps)} steps, at most {largest} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
