"""The stills in docs/pictures, in light and dark, made from the demo's training script.

python docs/building/stills.py

It trains for half a minute, serves the run, and needs chromium and its driver.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
MOST = 200_000  # bytes of a picture
WIDE, SCALE = 1200, 1.25

PAGES = {  # with the height of the picture
    "overview": ("run/slipped", 1300),
    "layers": ("run/slipped/layers?stat=l2&port=grad_output", 600),
    "dashboard": ("run/slipped/layer?path=relu1", 1040),
    "flow": ("run/slipped/flow", 700),
    "model": ("run/slipped/graph", 900),
}


def main() -> None:
    """Train, serve the run, and take the pictures."""
    with tempfile.TemporaryDirectory() as folder:
        report, runs = Path(folder) / "report.html", Path(folder) / "runs"
        train = [sys.executable, "-m", "torchhook", "run", "--price", "off", "--to", str(runs), "--name", "slipped"]
        train += ["--report", str(report), str(ROOT / "examples" / "train_digits.py"), "--slip"]
        subprocess.run(train, check=True, capture_output=True)
        next(runs.glob("slipped-*")).rename(runs / "slipped")
        serve = [sys.executable, "-m", "torchhook", "dashboard", str(runs), "--port", "0"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            pages = {name: (address + page, high) for name, (page, high) in PAGES.items()}
            try:
                take({**pages, "report": (f"{report.as_uri()}#findings", 1040)})
            finally:
                server.terminate()


def take(pages: dict[str, tuple[str, int]]) -> None:
    """A picture of each page in both themes; the dark one is called ``NAME-dark.png``."""
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(flag)
    with Chrome(options=options, service=Service("/usr/bin/chromedriver")) as browser:
        for (name, (url, high)), theme in product(pages.items(), ("light", "dark")):
            size = {"width": WIDE, "height": high, "deviceScaleFactor": SCALE, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            browser.get(url)
            time.sleep(5)  # everything is drawn
            picture = PICTURES / f"{name}{'-dark' if theme == 'dark' else ''}.png"
            browser.save_screenshot(str(picture))
            assert picture.stat().st_size < MOST, f"{picture} has {picture.stat().st_size:,} bytes"


if __name__ == "__main__":
    main()
