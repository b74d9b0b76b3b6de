"""Processes that write runs and are killed while they do: ``python killed_writers.py ROOT HOW=NUMBER ...``.

Importing torch takes longer than writing a run, so it is imported once, and the writers are forked. Of each the folder
is printed, and the steps and findings that it had been told were written.
"""

import functools
import json
import os
import random
import signal
import sqlite3
import sys
import time
from pathlib import Path

import torch
from run_samples import entry_of, snapshot_at

from torchhook import Finding, Report
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog, schema

MAX_BYTES = {"all": 2**26, "thinned": 2**20, "journal": 2**26}  # by how it is written
LINES = {"all": 100, "thinned": 600, "journal": 100}  # that are told at most before the end


@functools.lru_cache(None)
def snapshot_of(how, step):
    """What a writer measures in a step."""
    sites = [f"layer{number}" for number in range(40 if how == "thinned" else 4)]
    return snapshot_at(step % 8, sites=sites) if step < 8 else snapshot_of(how, step % 8)


def write(folder, how, pipe):
    """Write until killed, and tell of what is written after it is."""
    if how == "journal":  # as on a disk that has no write-ahead log
        draw = schema._draw

        def drawn(file, journal):
            if journal == "wal":
                raise sqlite3.OperationalError("no")
            draw(file, journal)

        schema._draw = drawn
    log = RunLog(folder, max_bytes=MAX_BYTES[how])
    log.begin({"model": "Net"})
    os.write(pipe, b"begun 0\n")
    maps = {"conv": torch.rand(4, 16, 16)}
    for step in range(10**6):
        entry = entry_of(step, snapshot_of(how, step))
        log.write(entry if step % 5 else Entry(**{**vars(entry), "maps": maps}))
        os.write(pipe, f"step {step}\n".encode())
        if step % 3 == 0:
            log.found(Finding("TH201", "error", "it is so", site=str(step), step=step))
            os.write(pipe, f"finding {step}\n".encode())
        log.keep(Report(model="Net", notes=(str(step),)), step)


def killed(folder, how, lines, seconds):
    """What was told by a writer that lived for some seconds after it had told so many lines."""
    read, pipe = os.pipe()
    writer = os.fork()
    if not writer:
        try:
            os.close(read)
            write(folder, how, pipe)
        finally:
            os._exit(1)
    os.close(pipe)
    with os.fdopen(read) as told:
        said = [told.readline() for _ in range(lines)]
        time.sleep(seconds)
        os.kill(writer, signal.SIGKILL)
        said += told.readlines()
    _, status = os.waitpid(writer, 0)
    return {"folder": str(folder), "signal": status, "told": [line.split() for line in said]}


def main(root, *numbers):
    torch.set_num_threads(1)
    chance = random.Random(0)
    for how, _, number in (text.partition("=") for text in numbers):
        for step in range(8):
            snapshot_of(how, step)  # once for all
        for one in range(int(number)):
            lines = chance.randint(0, chance.choice([0, 5, LINES[how], LINES[how]]))
            end = killed(Path(root, f"{how}-{one}"), how, lines, 0.01 * chance.random())
            print(json.dumps({"how": how, **end}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
