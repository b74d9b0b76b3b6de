"""The dashboard's time to first paint and per live update, in a real browser.

A run of 200 layers × 10,000 recorded steps that keeps growing, in Debian's chromium, headless. First paint: from the
request of a page until its first graph is drawn, with an empty browser cache. Live update: from the page's request for
new data until it is drawn, without the interval between requests.

    python benchmarks/dashboard.py [--layers 200] [--steps 10000]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from capture import verdict
from harness import machine, markdown
from runs import windows
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog

PAINT, UPDATE = 1500, 300  # milliseconds, at most
UPDATES = 20
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
    options = parser.parse_args()
    print(f"{machine()}, {options.layers} layers × {options.steps:,} steps\n")
    torch.set_num_threads(1)
    made = windows(options.layers, ports=2)
    with tempfile.TemporaryDirectory() as folder:
        log = RunLog(Path(folder) / "run", max_bytes=2**30)
        log.begin({"model": "Net", "every": 10})
        for step in range(options.steps):
            log.write(entry(step, made))
        command = [sys.executable, "-m", "torchhook", "dashboard", folder, "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            try:
                rows, verdicts = measured(address, log, made, options.steps)
            finally:
                server.terminate()
    print(markdown(["page", "first paint", "live update"], rows))
    print("\n".join(("", *verdicts)))


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
    drawing = f"#{graph} .heatmaplayer image, #{graph} .scatterlayer .trace"
    script = f"return document.querySelector('{drawing}') ? performance.now() : null"
    for _ in range(2000):
        found = browser.execute_script(script)
        if found is not None:
            return float(found)
        time.sleep(0.01)
    raise TimeoutError(f"{graph} was never drawn")


if __name__ == "__main__":
    main()
