"""The cost of a run on disk: its size, the time of a write and of thinning out, and the time to open and read it.

    python benchmarks/runs.py
    python benchmarks/runs.py --steps 20000 --ports 5

Every step is an entry with the moments of all sites at each port, written through `RunLog`. The sizes are the largest
that the folder ever had, including SQLite's write-ahead log.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from harness import in_fresh_process, machine, markdown
from torch import nn

from torchhook.core.findings import Finding, Report
from torchhook.core.site import Site
from torchhook.rules.history import settled
from torchhook.stats.reading import Snapshot
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog
from torchhook.training.runs.run import Run

PORTS = ("output", "grad_output", "param", "param_grad", "update")
_DIFFERENT = 64  # snapshots, which are reused in turn


def windows(sites: int, ports: int) -> list[Snapshot]:
    """Different snapshots, of values like the outputs of layers."""
    made = []
    module = nn.Linear(1, 1)
    for number in range(_DIFFERENT):
        reduce = Reduce("moments")
        for site in range(sites):
            for port in PORTS[:ports]:
                values = torch.randn(500) * (1 + site % 7) / (1 + number)
                reduce.cell(Site(f"blocks.{site // 4}.{site % 4}", port), module).update(values.relu())
        made.append(settled(reduce.snapshot()))
    return made


def write(folder: Path, sites: int, ports: int, steps: int, max_bytes: int) -> dict[str, float]:
    """Write a run; returns milliseconds and MiB."""
    torch.set_num_threads(1)
    made = windows(sites, ports)
    log, seconds, largest = RunLog(folder, max_bytes), [], 0
    log.begin({"model": "Net"})
    for step in range(steps):
        entry = Entry(step, float(step), made[step % _DIFFERENT], losses={step: 1 / (step + 1)}, rate=1e-3)
        begun = time.perf_counter()
        log.write(entry)
        seconds.append(time.perf_counter() - begun)
        largest = max(largest, sum(file.stat().st_size for file in folder.iterdir()))
    log.found(Finding("TH201", "error", "61 % of the units never fire", site="blocks.0.1", step=steps // 2))
    log.end(Report(model="Net"), "ended")
    return {
        "largest": largest / 2**20,
        "left": sum(file.stat().st_size for file in folder.iterdir()) / 2**20,
        "write": 1e3 * median(seconds),
        "late": 1e3 * sorted(seconds)[int(0.99 * len(seconds))],
        "longest": 1e3 * max(seconds),
    }


def read(folder: Path) -> dict[str, float]:
    """Seconds to open a run and read what a first page shows, and to read more."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    with Run(folder) as run:
        _ = run.about, run.places, run.findings, run.losses
        opened = time.perf_counter()
        run.series("std")
        shown = time.perf_counter()
        run.series("std", most=10_000)
        many = time.perf_counter()
        run.history()
        return {
            "windows": len(run.steps),
            "open": opened - begun,
            "open_and_series": shown - begun,
            "series_10000": many - shown,
            "history": time.perf_counter() - many,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument(
        "--ports", type=int, nargs="+", default=[1, 5], help="how many ports: output, its gradient, parameters, …"
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--max-bytes", type=int, default=2**28)
    options = parser.parse_args()
    rows: dict[str, list[str]] = {}
    for ports in options.ports:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root, "run")
            wrote = in_fresh_process(write, folder, options.sites, ports, options.steps, options.max_bytes)
            found = in_fresh_process(read, folder)
        row = {
            "largest size, MiB": f"{wrote['largest']:.0f}",
            "final size, MiB": f"{wrote['left']:.0f}",
            "windows kept": f"{found['windows']:,}",
            "a write, ms (median)": f"{wrote['write']:.2f}",
            "a write, ms (1 in 100 is slower)": f"{wrote['late']:.2f}",
            "a write that thins, ms (longest)": f"{wrote['longest']:.0f}",
            "open, and read all but series, s": f"{found['open']:.2f}",
            "the same and a series of up to 1,000 steps, s": f"{found['open_and_series']:.2f}",
            "a series of up to 10,000 steps, s": f"{found['series_10000']:.2f}",
            "a history of 128 windows, s": f"{found['history']:.2f}",
        }
        for name, value in row.items():
            rows.setdefault(name, [name]).append(value)
    print(f"{machine()}, torch {torch.__version__}")
    print(f"{options.sites} sites with moments, {options.steps:,} steps, max_bytes={options.max_bytes}\n")
    print(markdown(["", *(f"{ports} port{'s' if ports > 1 else ''}" for ports in options.ports)], list(rows.values())))


if __name__ == "__main__":
    main()
