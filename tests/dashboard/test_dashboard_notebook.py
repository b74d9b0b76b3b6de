"""`dashboard.show` as a notebook calls it: a frame below the cell, served by a process that ends with this one."""

import subprocess
import sys
import urllib.request

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn
from traitlets.config import Config

import torchhook
from torchhook.core.errors import RunError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def _shell(tmp_path, monkeypatch):
    """What a kernel has, without its history."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    hooks = sys.displayhook, sys.excepthook
    InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield
    InteractiveShell.clear_instance()
    sys.displayhook, sys.excepthook = hooks


def shown(*args, **options):
    with capture_output() as captured:
        result = torchhook.dashboard.show(*args, **options)
    [frame] = captured.outputs
    return result, frame.data["text/html"]


def address_in(page):
    return page.split('src="')[1].split('"')[0]


def test_a_model_is_watched_and_shown(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor, page = shown(model, optimizer, height=300, every=1, to=[tmp_path])
    assert 'height="300"' in page
    with monitor:
        for _ in range(3):
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    with urllib.request.urlopen(address_in(page)) as answer:
        assert answer.status == 200 and b"torchhook" in answer.read()
    run, _ = shown(torchhook.Run(monitor.run))
    assert run.steps == [0, 1, 2]


def test_a_monitor_without_a_run_cannot_be_shown():
    monitor = torchhook.Monitor(nn.Linear(2, 2), to=[])
    with monitor, pytest.raises(RunError, match="does not write a run"):
        torchhook.dashboard.show(monitor)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(RunError, match="did not start"):
        torchhook.dashboard.show(tmp_path / "nowhere")


def test_the_server_ends_with_the_notebook(tmp_path):
    code = (
        "import sys, torchhook, torchhook.dashboard.notebook as n\n"
        "n._display = lambda address, height: print(address)\n"
        "torchhook.dashboard.show(sys.argv[1])"
    )
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-c", code, str(tmp_path / "runs")]
    address = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=5)
