"""The log into MLflow: a server in a process of its own, and a database without one."""

import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import mlflow
import pytest
import torch
from log_samples import BROKEN, LESSER, NAMES, REPORT, SCRIPT, elsewhere, entry, many, silence
from mlflow import MlflowClient

from torchhook.core.findings import Finding
from torchhook.integrations import mlflow as module
from torchhook.integrations.mlflow import MLflow


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, folder / "log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 9)
        process.wait()


def wait_for(address, process, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/mlflow.db"


@pytest.fixture(params=["server", "database"])
def client(request, monkeypatch, tmp_path, own_mlflow):
    """The default client, of which no run is active before and after."""
    monkeypatch.chdir(tmp_path)  # the database has its artifacts in the working folder
    mlflow.set_tracking_uri(request.getfixturevalue(request.param))
    return MlflowClient()


def written(log, *entries, findings=(), state="ended"):
    """Begun here, the rest done as the monitor does it, without a word of trouble."""
    log.begin({})

    def rest():
        for one in entries:
            log.write(one)
        for finding in findings:
            log.found(finding)
        log.end(REPORT, state)

    with silence():
        elsewhere(rest)
    assert not log._has_warned
    return log


def history(client, run_id, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


@pytest.mark.slow
def test_the_active_run_is_written_to_and_stays_the_users(client):
    with mlflow.start_run() as run:
        log = written(MLflow(), entry(3, {"fc": torch.tensor([1.0, 3.0])}), findings=[BROKEN, LESSER])
        assert log.run_id == run.info.run_id == mlflow.active_run().info.run_id
        assert client.get_run(log.run_id).info.status == "RUNNING"
        mlflow.log_metric("mine", 1.0)
    assert history(client, log.run_id, "torchhook/mean/fc") == [(3, 2.0)]
    assert client.get_metric_history(log.run_id, "torchhook/mean/fc")[0].timestamp == 1_700_000_003_000
    data = client.get_run(log.run_id).data
    assert data.metrics["mine"] == 1.0 and data.params == {}
    assert data.tags["torchhook.TH101"] == str(BROKEN) and data.tags["torchhook.TH403"] == str(LESSER)
    assert data.tags["torchhook.report"] == REPORT.headline


def test_the_report_is_there_as_files(client, tmp_path):
    log = written(MLflow())
    names = {file.path for file in client.list_artifacts(log.run_id, "torchhook")}
    assert names == {"torchhook/report.json", "torchhook/report.md", "torchhook/report.html"}
    texts = {name: Path(client.download_artifacts(log.run_id, name, str(tmp_path))).read_text() for name in names}
    assert json.loads(texts["torchhook/report.json"])["findings"][0]["site"] == SCRIPT
    assert "<script>alert" not in texts["torchhook/report.html"] + texts["torchhook/report.md"]


@pytest.mark.parametrize(("state", "status"), [("ended", "FINISHED"), ("failed", "FAILED"), ("interrupted", "KILLED")])
def test_without_a_run_it_has_its_own_and_ends_that(client, state, status):
    log = MLflow()
    log.begin({})
    assert client.get_run(log.run_id).info.status == "RUNNING"
    assert mlflow.active_run() is None
    elsewhere(lambda: log.end(REPORT, state))
    assert client.get_run(log.run_id).info.status == status


def test_its_own_run_is_in_the_experiment_of_the_user(client, monkeypatch):
    wanted = mlflow.set_experiment(f"mine {time.time()}").experiment_id
    assert client.get_run(written(MLflow()).run_id).info.experiment_id == wanted
    monkeypatch.delenv("MLFLOW_EXPERIMENT_ID")  # which mlflow has set
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    other = client.create_experiment(f"other {time.time()}")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", client.get_experiment(other).name)
    assert client.get_run(written(MLflow()).run_id).info.experiment_id == other


def test_a_given_run_is_not_ended_and_another_that_is_active_not_touched(client):
    given = client.create_run("0").info.run_id
    with mlflow.start_run() as active:
        written(MLflow(given), entry(0, {"fc": torch.ones(2)}))
        assert mlflow.active_run().info.run_id == active.info.run_id
    assert client.get_run(given).info.status == "RUNNING"
    assert "torchhook/mean/fc" in client.get_run(given).data.metrics
    assert not client.get_run(active.info.run_id).data.metrics


def test_a_given_client_is_not_that_of_the_active_run(client, server, database):
    other = MlflowClient(database if client.tracking_uri == server else server)
    with mlflow.start_run() as active:
        log = written(MLflow(client=other), entry(0, {"fc": torch.ones(2)}))
    assert log.run_id != active.info.run_id
    assert other.get_run(log.run_id).info.status == "FINISHED"
    assert "torchhook/mean/fc" in other.get_run(log.run_id).data.metrics


def test_a_run_that_the_user_ended_before_is_written_to_all_the_same(client):
    log = MLflow()
    with mlflow.start_run() as run:
        log.begin({})
    with silence():
        log.write(entry(0, {"fc": torch.ones(2)}))
        log.end(REPORT, "ended")
    assert "torchhook/mean/fc" in client.get_run(run.info.run_id).data.metrics
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_hostile_names_stay_apart(client):
    places = {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}
    hostile = Finding("a/b<script>", "info", "x" * 10_000)
    log = written(MLflow(), entry(0, places), findings=[hostile])
    metrics = client.get_run(log.run_id).data.metrics
    means = [value for name, value in metrics.items() if name.startswith("torchhook/mean/")]
    assert sorted(means) == list(range(len(NAMES)))
    (tag,) = [value for key, value in client.get_run(log.run_id).data.tags.items() if "torchhook.a_b" in key]
    assert len(tag) == 1000


def test_five_thousand_metrics_a_step(client):
    losses = {step: float(step) for step in range(5000)}
    log = written(MLflow(), entry(4999, {"fc": torch.ones(2)}, losses=losses))
    points = client.get_metric_history(log.run_id, "torchhook/loss")
    assert sorted((point.step, point.value) for point in points) == list(losses.items())


def test_nan_is_kept_and_infinities_are_left_out(client):
    log = written(MLflow(), entry(2, {}, losses={0: math.inf, 1: -math.inf, 2: math.nan}, rate=0.1))
    ((step, value),) = history(client, log.run_id, "torchhook/loss")
    assert step == 2 and math.isnan(value)


def images(client, run_id):
    """The images of a run: name and step."""
    paths = [file.path for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png")]
    return {tuple(path.removeprefix("images/").split("+")[0:3:2]) for path in paths}


def test_maps_of_a_training_are_images(client):
    log = written(MLflow(), entry(4, {}, maps={"conv": torch.rand(4, 3, 3)}))
    assert images(client, log.run_id) == {("torchhook~maps~conv", "4")}


def test_maps_without_a_training_go_to_the_active_run(client):
    with mlflow.start_run() as run:
        log = MLflow()
        log.feature_maps({"conv": torch.rand(2, 4, 6, 5), "fc": torch.rand(2, 10)}, step=3)
        assert client.get_run(run.info.run_id).info.status == "RUNNING"
    assert images(client, run.info.run_id) == {("torchhook~maps~conv", "3"), ("torchhook~mean_map~conv", "3")}


def test_maps_without_a_run_have_their_own_which_is_finished(client):
    log = MLflow()
    for step in (0, 1):
        log.feature_maps({name: torch.rand(2, 3, 3) for name in NAMES}, step)
    assert client.get_run(log.run_id).info.status == "FINISHED"
    assert len(images(client, log.run_id)) == 2 * 2 * len(NAMES), "hostile and long names stay apart"


def test_layers_choose(client):
    log = written(MLflow(layers="*.0001"), many(0, 3))
    assert {name.split("/")[-1] for name in client.get_run(log.run_id).data.metrics} == {"layers.0001"}


def test_trouble_is_told_once_and_may_pass(client):
    log = MLflow()
    log.begin({})
    client.delete_run(log.run_id)
    with pytest.warns(UserWarning, match="some metrics were not logged to MLflow: .*Exception") as told:
        for step in range(3):
            log.write(entry(step, {"fc": torch.ones(2)}))
        drained(log)
        client.restore_run(log.run_id)
        log.write(entry(3, {"fc": torch.ones(2)}))
        log.end(REPORT, "ended")
    assert len(told) == 1
    assert history(client, log.run_id, "torchhook/mean/fc") == [(3, 1.0)]
    assert client.get_run(log.run_id).info.status == "FINISHED"


def drained(log):
    while not log._calls.empty():
        time.sleep(0.01)
    time.sleep(0.5)  # the last is under way


def test_a_server_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        log = MLflow("run", MlflowClient(f"http://127.0.0.1:{silent.getsockname()[1]}"))
        log.begin({})
        begun = time.perf_counter()
        with pytest.warns(UserWarning) as told:
            for step in range(100):
                log.write(entry(step, {"fc": torch.ones(2)}))
            log.end(REPORT, "ended")
        assert time.perf_counter() - begun < 5
    assert "cannot keep up with the training" in str(told[0].message) and "may be missing" in str(told[1].message)
    assert len(told) == 2
