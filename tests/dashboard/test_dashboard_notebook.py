"""`dashboard.show` as a notebook calls it: a frame below the cell, served by a process that ends with this one."""

import html
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import webbrowser

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from torch import nn
from traitlets.config import Config

import torchhook
from torchhook.core.errors import RunError
from torchhook.dashboard.page import page_of
from torchhook.render.words import heading

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
    code = "import sys, torchhook; torchhook.dashboard.show(sys.argv[1])"
    (tmp_path / "runs").mkdir()
    command, environment = [sys.executable, "-c", code, str(tmp_path / "runs")], {**os.environ, "DISPLAY": ""}
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=environment)
    address = told.stdout.strip()
    assert address.startswith("http://127.0.0.1:"), "a script is told the address"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=5)


@pytest.fixture
def acts():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 2))
    with torchhook.capture(model, grads=True) as found:
        model(torch.randn(2, 1, 8, 8)).sum().backward()
    return found


def test_a_capture_is_a_page_in_the_notebook_itself(acts):
    path, frame = shown(acts, height=300)
    assert "height: 300px" in frame and frame.count("<iframe") == 1
    page = html.unescape(frame.split('srcdoc="')[1].split('"></iframe>')[0])
    assert page == path.read_text(encoding="utf-8") and "<h2>Feature maps</h2>" in page
    assert "Gradient flow" in page, "gradients were captured, too"


def test_a_page_shows_the_gradients_that_were_captured(acts):
    page = page_of(acts)
    for calls in acts.values():
        row = re.search(rf'<th scope="row"><code>{calls.path}</code></th>(.*?)</tr>', page).group(1)
        wanted = float(calls.grad.square().mean().sqrt())
        assert float(re.findall(r'"number">([^<]*)<', row)[-1]) == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_draws_its_figures_in_a_browser(acts, tmp_path, theme):
    browser = shutil.which("chromium") or pytest.skip("chromium is not installed")
    file = tmp_path / "page.html"
    file.write_text(page_of(acts), encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={int(theme == 'light')}"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", scheme]
    command = [browser, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()]
    drawn = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    names = re.findall(r'id="plot-([^"]*)" class="[^"]*js-plotly-plot', drawn)
    assert names[:3] == ["gradient-flow", "activations", "distributions"]
    assert len(set(names)) == 5, "and the mean maps of two layers"


def test_results_of_other_verbs_are_shown():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(8, 4)
    convolution = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for result in (
        torchhook.compare.cka(model, None, x.split(4), progress=False),
        torchhook.sweep(model, x, ["0"], torchhook.edits.zero(), torch.sum, progress=False),
        torchhook.explain.grad_cam(convolution, torch.randn(2, 1, 6, 6), sites="0"),
    ):
        page = page_of(result)
        shown = result._repr_html_() if isinstance(result, torchhook.explain.Heat) else result._title()
        assert shown in page and f"<h1>{heading(type(result).__name__)}</h1>" in page


def test_a_result_is_shown_in_the_notebook_itself_and_a_saved_one_is_served(tmp_path):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(8, 4)
    result = torchhook.compare.cka(model, None, x.split(4), progress=False)
    path, frame = shown(result)
    page = html.unescape(frame.split('srcdoc="')[1].split('"></iframe>')[0])
    assert page == path.read_text(encoding="utf-8") == torchhook.render.html(result) and "plot-similarity" in page
    result.save(tmp_path / "cka.th")
    _, frame = shown(tmp_path / "cka.th")
    with urllib.request.urlopen(address_in(frame)) as answer:
        assert answer.status == 200


def test_what_a_hook_manager_and_diagnostics_have_is_shown():
    model, x = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU()), torch.randn(2, 1, 8, 8)
    manager = torchhook.HookManager(model)
    manager.add("1")
    with torchhook.ModelDiagnostics(model) as diagnostics:
        model(x)
    for what, path in ((manager, "1"), (diagnostics, "0")):
        assert f'<th scope="row"><code>{path}</code></th>' in page_of(what)


def test_names_from_outside_are_text():
    page = page_of({"<script>alert(1)</script>": torch.rand(3, 4, 4)})
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page


@pytest.mark.parametrize(
    ("what", "error", "said"),
    [
        (3, TypeError, "what must be a model, a monitor, .*; not 3"),
        ({}, ValueError, "there is nothing to show: no value was recorded yet"),
        ({"a": "text"}, TypeError, r"what\['a'\] must be a tensor"),
        (torchhook.Snapshot({}), ValueError, "there is nothing to show: nothing was measured yet"),
    ],
)
def test_what_cannot_be_shown_is_said(what, error, said):
    with pytest.raises(error, match=said):
        torchhook.dashboard.show(what)


def test_options_of_a_monitor_are_for_a_model(acts):
    with pytest.raises(TypeError, match="every: only a model takes this, not Capture"):
        torchhook.dashboard.show(acts, every=3)


def test_where_there_is_a_screen_a_script_opens_the_browser(monkeypatch, acts, capsys):
    InteractiveShell.clear_instance()
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for screen in ("", ":0"):
        monkeypatch.setenv("DISPLAY", screen)
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
        path = torchhook.dashboard.show(acts)
        assert capsys.readouterr().out.strip() == path.as_uri()
        assert opened == ([path.as_uri()] if screen else [])
