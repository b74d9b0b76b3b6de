"""The dashboard's time to first paint and per live update, in a real browser.

A run of 200 layers × 10,000 recorded steps that keeps growing, in Debian's chromium, headless. First paint: from the
request of a page until its first graph is drawn, with an empty browser cache. Live update: from the page's request for
new data until it is drawn, without the interval between requests. The list of 2,000 runs: from its request until the
first rows are visible, by a server that has just started and has read none of them.

    python benchmarks/dashboard.py [--layers 200] [--steps 10000] [--runs 2000]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from capture import verdict
from harness import machine, markdown
from runs import windows
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from torchhook import Report
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog
from torchhook.training.runs.schema import FILE

PAINT, LIST, UPDATE = 1500, 1000, 300  # milliseconds, at most
UPDATES, TIMES = 20, 3
PAGES = {
    "Overview": ("", "overview-loss"),
    "Layers": ("/layers", "layers-heat"),
    "Gradient flow": ("/flow", "flow-grad_output"),
}

# Measures the time from a request of the page until the result is drawn.
_NOTES = """
window.asked = 0; window.took = [];
const plain = window.fetch;
window.fetch = (...args) => {
  if (String(args[1]?.body).includes('-tick"')) window.asked = performance.now();
  return plain(...args);
};
document.querySelector('#GRAPH .js-plotly-plot').on('plotly_afterplot', () => {
  if (window.asked) window.took.push(performance.now() - window.asked);
  window.asked = 0;
});
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=2000)
    options = parser.parse_args()
    print(f"{machine()}, {options.layers} layers × {options.steps:,} steps\n")
    torch.set_num_threads(1)
    made = windows(options.layers, ports=2)
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder) / "run", max_bytes=2**30)
        log.begin({"model": "Net", "every": 10})
        for step in range(options.steps):
            log.write(entry(step, made))
        with served(folder) as address:
            rows, verdicts = measured(address, log, made, options.steps)
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder), made, options.runs)
        painted = median(listed(folder) for _ in range(TIMES))
    rows.append([f"{options.runs:,} runs", f"{painted:.0f} ms", ""])
    verdicts.append(verdict(f"{options.runs:,} runs: first rows {painted:.0f} ms", f"{LIST} ms", painted <= LIST))
    print(markdown(["page", "first paint", "live update"], rows))
    print("\n".join(("", *verdicts)))


@contextmanager
def served(folder: str) -> Iterator[str]:
    command = [sys.executable, "-m", "torchhook", "dashboard", folder, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


def fill(folder: Path, made: list[Any], count: int) -> None:
    """As many runs as that, which are the same file by other names."""
    log = RunLog(folder / "run-0")
    log.begin({"model": "Net", "every": 10})
    for step in range(120):
        log.write(entry(step, made))
    log.end(Report(), "ended")
    for number in range(1, count):
        (folder / f"run-{number}").mkdir()
        os.link(folder / "run-0" / FILE, folder / f"run-{number}" / FILE)


def listed(folder: str) -> float:
    """Milliseconds until a browser shows the first rows of the list of runs."""
    browser = opened()
    try:
        with served(folder) as address:
            browser.get(address)
            return seen(browser, ".ag-row a")
    finally:
        browser.quit()


def entry(step: int, made: list[Any]) -> Entry:
    return Entry(step, float(step), made[step % len(made)], losses={step: 1 / (step + 1)}, rate=1e-3)


def measured(address: str, log: RunLog, made: list[Any], step: int) -> tuple[list[list[str]], list[str]]:
    rows, verdicts = [], []
    for name, (page, graph) in PAGES.items():
        browser = opened()
        try:
            browser.get(f"{address}run/run{page}")
            painted = drawn(browser, graph)
            browser.execute_script(_NOTES.replace("GRAPH", graph))
            while len(took := browser.execute_script("return window.took")) < UPDATES:
                log.write(entry(step, made))
                step += 1
                time.sleep(0.3)
        finally:
            browser.quit()
        rows.append([name, f"{painted:.0f} ms", f"{median(took):.0f} ms, longest {max(took):.0f} ms"])
        verdicts.append(verdict(f"{name}: first paint {painted:.0f} ms", f"{PAINT} ms", painted <= PAINT))
        verdicts.append(verdict(f"{name}: update {median(took):.0f} ms", f"{UPDATE} ms", median(took) <= UPDATE))
    return rows, verdicts


def opened() -> Chrome:
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
    ):
        options.add_argument(flag)
    return Chrome(options=options, service=Service("/usr/bin/chromedriver"))


def drawn(browser: Chrome, graph: str) -> float:
    """Milliseconds from the request until a graph is drawn."""
    return seen(browser, f"#{graph} .heatmaplayer image, #{graph} .scatterlayer .trace")


def seen(browser: Chrome, selector: str) -> float:
    """Milliseconds from the request until something is in the page."""
    script = f"return document.querySelector('{selector}') ? performance.now() : null"
    for _ in range(2000):
        found = browser.execute_script(script)
        if found is not None:
            return float(found)
        time.sleep(0.01)
    raise TimeoutError(f"{selector} was never drawn")


if __name__ == "__main__":
    main()
