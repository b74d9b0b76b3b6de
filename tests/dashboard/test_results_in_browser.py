"""Saved results in a real browser: each verb's page in light, dark and on a phone, whatever the file holds."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import torchhook
from torchhook import Finding, Report
from torchhook.core.parts import Bars, Matrix, Sentence, Table
from torchhook.core.result import write

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

DESKTOP, PHONE = (1280, 900), (390, 844)
EVIL = "<img src=x onerror=window.__pwned=1>"
PATIENCE = 20.0  # seconds, for a machine that does other things, too


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, one_thread):
    folder, x = tmp_path_factory.mktemp("results"), torch.randn(24, 4)
    torchhook.compare.cka(net(0), net(1), x.split(8), progress=False).save(folder / "cka.th")
    torchhook.diff(net(0), net(1), x).save(folder / "diff.th")
    torchhook.compare.datasets(net(0), x.split(8), (x + 9).split(8), progress=False).save(folder / "datasets.th")
    torchhook.sweep(net(0), x, ["0", "2"], torchhook.edits.zero(), torch.sum, progress=False).save(folder / "sweep.th")
    layers = ({"site": "fc", "kind": "module", "grad_norm": 0.1, "std": 1.0},)
    Report((Finding("TH201", "error", "61 % never fire", "fc"),), "Net", layers=layers).save(folder / "diagnose.th")
    talking = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    torchhook.verify(talking, x, contracts=["independent", "causal"], progress=False).save(folder / "verify.th")
    parts = [Sentence(EVIL), Table([EVIL, "a.b"], [[EVIL, 1.0]] * 3, EVIL), Bars([EVIL], {EVIL: [1.0]}, EVIL, EVIL)]
    more = [Matrix(torch.eye(2), [EVIL, "b"], [EVIL, "b"], EVIL, EVIL), Report((Finding(EVIL, "error", EVIL, EVIL),))]
    write(EVIL, [*parts, *more], folder / "evil.th")
    (folder / "broken.th").write_bytes(b"\x80\x04cos\nsystem\n")
    (folder / "outside").mkdir()
    torchhook.diff(net(0), net(1), x).save(folder / "outside" / "secret.th")
    return folder


@pytest.fixture(scope="module")
def address(folder):
    yield from served(folder)


def served(path):
    command = [sys.executable, "-m", "torchhook", "dashboard", str(path), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    yield process.stdout.readline().strip()
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert said == "", said[-4000:]


@pytest.fixture
def browse(chrome, address):
    """Open a page; afterwards the console must be empty and nobody else have been asked."""
    for log in ("browser", "performance"):
        chrome.get_log(log)

    def opened(path, size=DESKTOP, theme="light", address=address):
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
        chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        chrome.get("about:blank")
        chrome.get(address + path.lstrip("/"))
        until(chrome, "return document.querySelector('main')?.children.length > 0")
        return chrome

    yield opened
    chrome.get("about:blank")
    assert chrome.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in chrome.get_log("performance")]
    urls = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert urls and all(url.startswith(("http://127.0.0.1", "data:", "about:", "blob:", "chrome:")) for url in urls)


def until(chrome, script):
    deadline = time.monotonic() + PATIENCE
    while not chrome.execute_script(script):
        assert time.monotonic() < deadline, script
        time.sleep(0.05)


DRAWN = """
const graphs = [...document.querySelectorAll('.graph')], grids = [...document.querySelectorAll('.ag-root-wrapper')];
return graphs.length + grids.length > 0 && graphs.every(graph => graph.querySelector('.main-svg'))
    && grids.every(grid => grid.querySelector('.ag-center-cols-container .ag-cell'))
"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["cka", "diff", "datasets", "sweep", "diagnose", "evil"])
def test_a_result_has_a_page(browse, name, size, theme):
    chrome = browse(f"/result/{name}.th", size, theme)
    until(chrome, DRAWN)
    assert chrome.execute_script("return document.documentElement.scrollWidth") <= size[0]
    assert chrome.execute_script("return window.__pwned") is None
    kinds = {"cka": "Similarity", "diff": "Difference", "datasets": "Spreads", "sweep": "Sweep", "evil": EVIL}
    assert chrome.find_element("css selector", "h1").text == kinds.get(name, "Report on Net")
    if theme == "dark" and name == "diff":
        script = "return getComputedStyle(document.querySelector('.ag-root-wrapper')).backgroundColor"
        assert sum(map(int, chrome.execute_script(script).strip("rgb()").split(","))) < 200, "the table is dark, too"


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_broken_contracts_have_a_page_with_what_was_not_checked(browse, size):
    chrome = browse("/result/verify.th", size)
    until(chrome, "return document.querySelector('main').innerText.includes('TV102')")
    text = chrome.find_element("css selector", "main").text
    assert chrome.find_element("css selector", "h1").text == "Report on Sequential"
    assert "changes with the other samples of the batch" in text and "1 contract checked, 1 skipped" in text, text
    assert "TV104: it needs a sequence of at least 4 positions" in text, text
    assert chrome.execute_script("return document.documentElement.scrollWidth") <= size[0]


def test_the_folder_lists_its_results_and_nothing_else(browse, folder):
    chrome = browse("/")
    links = [link.text for link in chrome.find_elements("css selector", "section a")]
    assert sorted(links) == sorted(file.name for file in folder.glob("*.th")) and "cka.th" in links
    chrome.find_element("link text", "sweep.th").click()
    until(chrome, "return document.querySelector('h1').innerText == 'Sweep'")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("broken.th", "is not a result that torchhook saved, or it is damaged"),
        ("nowhere.th", "there is no result 'nowhere.th'"),
        ("outside%2Fsecret.th", "there is no result 'outside/secret.th'"),
        ("..%2F..%2Fetc%2Fpasswd", "there is no result"),
    ],
)
def test_what_cannot_be_shown_is_said(browse, name, said):
    chrome = browse(f"/result/{name}")
    until(chrome, f"return document.querySelector('main').innerText.includes({json.dumps(said)})")


def test_a_single_result_is_the_whole_dashboard(browse, folder):
    server = served(folder / "cka.th")
    chrome = browse("/", address=next(server))
    until(chrome, DRAWN)
    assert chrome.find_element("css selector", "h1").text == "Similarity"
    chrome.get("about:blank")
    next(server, None)
