"""What every test may rely on: torchvision can be imported, nothing is downloaded, hooks are counted."""

import json
import os
import sys
import time
from pathlib import Path
from random import Random

pytest_plugins = ["pytester", "small_project"]
collect_ignore = ["site"]  # no tests: what their child processes import

SITE = str(Path(__file__).parent / "site")
sys.path.insert(0, SITE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SITE, os.environ.get("PYTHONPATH")]))
os.environ["HF_HUB_OFFLINE"] = "1"

import torchvision_cpu  # noqa: E402

torchvision_cpu.install()

import pytest  # noqa: E402
import torch  # noqa: E402

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
FLAGS = [
    "--headless=new",
    "--no-sandbox",  # which root has to do without
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


@pytest.fixture(autouse=True)
def _no_open_sessions():
    """A session that another test left open, or closed in another thread, is not here."""
    from torchhook.core.scope import sessions_here

    sessions_here.set(frozenset())


@pytest.fixture(scope="module")
def one_thread():
    """More gain nothing for small tensors, and wait for each other when other programs run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def chrome(tmp_path_factory):
    """Debian's browser, without a window."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    if not (Path(CHROMIUM).exists() and Path(DRIVER).exists()):
        pytest.fail("these tests need Debian's chromium and chromium-driver, which `make test` installs")
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    driver.get("about:blank")  # the browser's own new tab may still be loading
    yield driver
    driver.quit()


@pytest.fixture
def slowdown():
    """How many times longer work takes now than on an idle machine: limits in seconds are multiplied by it."""
    wall, cpu = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu < 0.1:
        pass
    return max(1.0, (time.monotonic() - wall) / 0.1)


@pytest.fixture
def own_mlflow(monkeypatch):
    """MLflow without a store, an experiment and a run that others chose; what is chosen here ends with the test."""
    import mlflow

    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")  # so that it is taken away afterwards: mlflow sets some of them itself
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(mlflow.tracking._tracking_service.utils, "_tracking_uri", None)
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    yield mlflow
    assert mlflow.active_run() is None


@pytest.fixture
def nothing_compiled():
    """Graphs of other tests neither help nor count, and none are left."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def pytest_collection_modifyitems(config, items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("--full"):
        left_out = _left_out(items, getattr(config.option, "randomly_seed", 0))
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _left_out(items, seed):
    """The cases of long lists that this run does not take: which ones depends on the seed that orders the tests."""
    lists = {}
    for item in items:
        if mark := item.get_closest_marker("long_list"):
            lists.setdefault((item.path, item.originalname), (mark.kwargs["sample"], []))[1].append(item)
    chosen = Random(seed)
    left_out = set()
    for sample, cases in lists.values():
        cases.sort(key=lambda item: item.nodeid)
        left_out.update(chosen.sample(cases, max(0, len(cases) - sample)))
    return left_out


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the long lists of cases whole, not a sample of them")
    parser.addoption("--matrix", help="write what the tests marked with matrix showed to this file")


def pytest_configure(config):
    config.matrix_rows = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    mark = item.get_closest_marker("matrix")
    if mark is not None and (report.when == "call" or not report.passed):
        place, claim = mark.args
        test = item.nodeid.split("[")[0]
        row = {"place": place, "claim": claim, "test": test, "outcome": report.outcome}
        item.config.matrix_rows.append(row)


def pytest_sessionfinish(session):
    file = session.config.getoption("--matrix")
    if file:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        environment = f"torch {torch.__version__.split('+')[0]}, {device}"
        rows = [dict(row) for row in {tuple(row.items()): None for row in session.config.matrix_rows}]
        result = {"environment": environment, "rows": rows}
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
