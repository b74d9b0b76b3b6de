"""The log into Weights & Biases, without a server: what a run wrote is read back from its own file."""

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import wandb
from log_samples import BROKEN, LESSER, NAMES, REPORT, SCRIPT, TRIED, elsewhere, entry, many, silence
from PIL import Image
from wandb.proto.wandb_internal_pb2 import Record

from torchhook.integrations.wandb import WandB

BLOCK, WHOLE, LAST = 32768, 1, 4
CLOCK = ("_timestamp", "_runtime", "_wandb")


@pytest.fixture(scope="module", autouse=True)
def service():
    yield
    wandb.teardown()


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Begin a run of the user's; it is finished in the end, if not before."""
    for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs = []

    def begun(name="run", **options):
        (tmp_path / name).mkdir()
        settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
        runs.append(wandb.init(mode="offline", dir=tmp_path / name, settings=settings, **options))
        return runs[-1]

    yield begun
    for run in runs:
        run.finish()


def records(run):
    """What a run that is over wrote. The last record is of its exit; the run may be over a moment before."""
    (file,) = Path(run.settings.sync_dir).glob("*.wandb")
    for _ in range(200):
        found = [Record.FromString(data) for data in cut(file.read_bytes())]
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{file} has no end")


def cut(data):
    """The records in a file: after a header of seven bytes, as LevelDB has them, in parts within blocks of 32 KiB."""
    at, part = 7, b""
    while at + 7 <= len(data):
        room = BLOCK - at % BLOCK
        if room < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if at <= len(data) and kind in (WHOLE, LAST):
            yield part
            part = b""


def rows(run):
    """The history: a dict for each row."""
    return [values(record.history.item) for record in records(run) if record.HasField("history")]


def summary(run):
    found = {}
    for record in records(run):
        found |= values(record.summary.update)
    return found


def values(items):
    found = {}
    for item in items:
        first, *rest = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if rest:
            found.setdefault(first, {})["/".join(rest)] = value
        else:
            found[first] = value
    return found


def theirs(row):
    """Without what the clock says and what is ours."""
    return {name: value for name, value in row.items() if name not in CLOCK and "torchhook" not in name}


def ours(run):
    return [row for row in rows(run) if "torchhook/step" in row]


def counted(run):
    run.log({"loss": 3.0})
    yield
    run.log({"a": 1}, commit=False)
    yield
    yield
    run.log({"loss": 2.0})
    run.log({"loss": 1.0})
    yield
    run.log({"a": 2}, commit=False)


def numbered(run):
    yield
    run.log({"loss": 3.0}, step=10)
    yield
    run.log({"accuracy": 0.5}, step=10)
    yield
    run.log({"loss": 2.0}, step=25)
    run.log({"loss": 1.0}, step=26)
    yield


@pytest.mark.parametrize(("training", "latest"), [(counted, [2, 3]), (numbered, [0, 2, 3])])
@pytest.mark.filterwarnings("ignore:several measured steps fell")
def test_rows_and_steps_of_the_user_are_as_without_us(begin, training, latest):
    alone = begin("alone")
    steps = [alone.step for _ in training(alone)]
    alone_step = alone.step
    alone.finish()

    run = begin("watched")
    log, found = WandB(), []
    log.begin({})
    for number, _ in enumerate(training(run)):
        found.append(run.step)
        elsewhere(lambda number=number: log.write(entry(number, {"fc": torch.ones(3)})))
    elsewhere(lambda: log.found(BROKEN))
    elsewhere(lambda: log.end(REPORT, "ended"))
    assert run.step == alone_step
    run.finish()

    assert found == steps
    mine = [row for row in map(theirs, rows(run)) if set(row) > {"_step"}]
    assert mine == [row for row in map(theirs, rows(alone)) if set(row) > {"_step"}]
    before, after = theirs(summary(alone)), theirs(summary(run))
    assert before.pop("_step") <= after.pop("_step") and before == after
    assert [row["torchhook/step"] for row in ours(run)] == latest


@pytest.mark.filterwarnings("ignore:several measured steps fell")
def test_both_may_log_at_the_same_time(begin):
    run = begin()
    log, one = WandB(), entry(0, {"fc": torch.ones(3)})
    log.begin({})
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(lambda: [log.write(replace(one, step=step)) for step in range(100)])
        for step in range(0, 600, 2):
            run.log({"loss": float(step)}, step=step)
        writing.result()
    run.finish()
    assert [(row["_step"], row["loss"]) for row in rows(run) if "loss" in row] == [(n, n) for n in range(0, 600, 2)]
    told = [row["torchhook/step"] for row in ours(run)]
    assert told and told == sorted(told)


def test_nothing_is_left_out_that_the_user_logs_as_often(begin):
    run = begin()
    log = WandB()
    log.begin({})
    with silence():
        for step in range(4):
            run.log({"loss": 1.0})
            log.write(entry(10 * step, {"fc": torch.tensor([1.0, 3.0]) * step}, losses={step: 0.5}))
        run.finish()
    told = [(row["torchhook/step"], row["torchhook/mean/fc"], row["torchhook/loss"]) for row in ours(run)]
    assert told == [(0, 0.0, 0.5), (10, 2.0, 0.5), (20, 4.0, 0.5), (30, 6.0, 0.5)]


def test_rows_that_are_written_over_are_told_of_once(begin):
    run = begin()
    log = WandB()
    log.begin({})
    with pytest.warns(UserWarning, match="several measured steps fell into one row.*commit=True") as told:
        for step in range(4):
            log.write(entry(step, {"fc": torch.ones(2)}))
    assert len(told) == 1
    run.finish()
    assert [row["torchhook/step"] for row in ours(run)] == [3]


def test_commit_writes_a_row_for_every_measured_step(begin):
    run = begin()
    log = WandB(run, commit=True)
    log.begin({})
    with silence():
        for step in (0, 5, 7):
            log.write(entry(step, {"fc": torch.ones(2)}))
    run.finish()
    assert [(row["_step"], row["torchhook/step"]) for row in ours(run)] == [(0, 0), (1, 5), (2, 7)]


def test_the_x_axis_is_our_step_and_the_summary_stays_small(begin):
    run = begin()
    log = WandB(commit=True)
    log.begin({})
    log.write(entry(0, {"layer1.0": torch.randn(100), "fc": torch.full((2,), math.nan)}))
    log.end(REPORT, "failed")
    run.finish()
    (glob,) = [record.metric for record in records(run) if record.metric.glob_name]
    assert (glob.glob_name, glob.step_metric) == ("torchhook/*", "torchhook/step")
    row = ours(run)[0]
    assert "torchhook/std/layer1:0" in row and math.isnan(row["torchhook/mean/fc"])
    said = summary(run)
    assert {name for name in said if name.startswith("torchhook")} == {
        "torchhook",
        "torchhook_findings",
        "torchhook_report",
    }
    assert said["torchhook"] == {"report": REPORT.headline, "state": "failed"}


@pytest.mark.parametrize(
    "data",
    [torch.randn(10_000), torch.cat([torch.zeros(5000), torch.rand(5000)]), torch.full((7,), 1.1), torch.zeros(3)],
    ids=["normal", "rectified", "constant", "zeros"],
)
def test_histograms_have_even_bins_and_all_values(begin, data):
    run = begin()
    log = WandB(commit=True)
    log.begin({})
    log.write(entry(0, {"fc": data}))
    run.finish()
    said = ours(run)[0]["torchhook/output/fc"]
    edges, counts = torch.tensor(said["bins"], dtype=torch.float64), torch.tensor(said["values"])
    assert said["_type"] == "histogram" and len(counts) == 64 and len(edges) == 65
    assert edges[0] <= data.min() and edges[-1] >= data.max()
    assert float(counts.sum()) == pytest.approx(len(data))
    right = torch.histogram(data.double(), edges).hist
    assert float((counts.cumsum(0) - right.cumsum(0)).abs().max()) <= 0.02 * len(data) or len(data) < 10


def test_values_that_are_all_nan_are_no_histogram_and_no_error(begin):
    run = begin()
    log = WandB(commit=True)
    log.begin({})
    log.write(entry(0, {"fc": torch.full((5,), math.nan)}))
    run.finish()
    assert "torchhook/output/fc" not in ours(run)[0]


def test_maps_are_pictures(begin):
    run = begin()
    log = WandB(commit=True)
    log.begin({})
    log.write(entry(0, {}, maps={SCRIPT: torch.tensor([0.0, 0.5, 1.0]).expand(2, 4, 3)}))
    run.finish()
    (said,) = [value for name, value in ours(run)[0].items() if name.startswith("torchhook/maps/")]
    picture = Image.open(Path(run.settings.files_dir, said["path"]))
    assert picture.size == (2 * 4 - 1, 4) and [picture.getpixel(place) for place in [(0, 1), (6, 1)]] == [0, 255]


def test_maps_without_a_training_are_pictures(begin):
    run = begin()
    WandB(run).feature_maps(
        {"conv.0": torch.tensor([0.0, 0.5, 1.0]).expand(1, 2, 4, 3), "fc": torch.rand(2, 10)}, step=6
    )
    run.finish()
    (row,) = ours(run)
    assert row["torchhook/step"] == 6 and {key for key in row if "map" in key} == {
        "torchhook/maps/conv:0",
        "torchhook/mean_map/conv:0",
    }
    mean = Image.open(Path(run.settings.files_dir, row["torchhook/mean_map/conv:0"]["path"]))
    assert mean.size == (3, 4) and [mean.getpixel((column, 1)) for column in range(3)] == [0, 128, 255]


def test_errors_are_alerts_and_the_report_is_a_page_a_table_and_files(begin):
    run = begin()
    log = WandB()
    log.begin({})
    for finding in (BROKEN, LESSER):
        log.found(finding)
    log.end(REPORT, "ended")
    run.finish()
    (alert,) = [record.alert for record in records(run) if record.HasField("alert")]
    assert alert.level == "ERROR" and len(alert.title) < 64
    assert "312 values are NaN" in alert.text and "<" not in alert.text
    assert alert.text.endswith("tried: learning rate a tenth → loss 0.31 instead of 2.28 after 100 steps")
    said = summary(run)
    page = Path(run.settings.files_dir, said["torchhook_report"]["path"]).read_text()
    assert "<script>alert" not in page and "312 values are NaN" in page and "https:" not in page
    table = json.loads(Path(run.settings.files_dir, said["torchhook_findings"]["path"]).read_text())
    assert [row[1] for row in table["data"]] == ["TH101", "TH403"] and table["data"][0][2] == SCRIPT
    assert [row[-1] for row in table["data"]] == [str(TRIED), ""]
    (artifact,) = [r.artifact for r in records(run) if r.HasField("artifact") and r.artifact.type == "report"]
    assert {file.path for file in artifact.manifest.contents} == {"report.json", "report.md", "report.html"}


def test_hostile_names_stay_apart(begin):
    run = begin()
    log = WandB(commit=True)
    log.begin({})
    log.write(entry(0, {name: torch.full((2,), float(number)) for number, name in enumerate(NAMES)}))
    run.finish()
    means = [value for name, value in ours(run)[0].items() if name.startswith("torchhook/mean/")]
    assert sorted(means) == list(range(len(NAMES)))


def test_layers_choose(begin):
    run = begin()
    log = WandB(layers="*.0001", commit=True)
    log.begin({})
    log.write(many(0, 3))
    run.finish()
    named = {name.split("/")[-1] for name in ours(run)[0] if name.startswith("torchhook/") and name != "torchhook/step"}
    assert named == {"layers:0001"}


def test_a_given_run_is_used_and_the_active_one_is_not(begin):
    active = begin("active")
    given = begin("given", reinit="create_new")
    log = WandB(given)
    log.begin({})
    log.write(entry(0, {"fc": torch.ones(2)}))
    log.end(REPORT, "ended")
    given.log({"still": "open"})
    assert wandb.run is active
    given.finish()
    active.finish()
    assert len(ours(given)) == 1 and rows(given)[0]["still"] == "open" and not rows(active)


def test_a_run_that_is_disabled_takes_nothing_and_says_nothing(monkeypatch):
    monkeypatch.setattr(wandb, "run", None)  # to which it goes back
    with wandb.init(mode="disabled"), silence():
        log = WandB()
        log.begin({})
        for step in range(2):
            log.write(entry(step, {"fc": torch.ones(2)}, maps={"fc": torch.ones(1, 2, 2)}))
        log.found(BROKEN)
        log.end(REPORT, "ended")


def test_a_run_that_is_shared_has_no_steps(begin, monkeypatch):
    run = begin()
    log = WandB()
    log.begin({})
    with monkeypatch.context() as patch:
        patch.setattr(type(run), "step", property(lambda run: 1 / 0))
        for step in range(2):
            log.write(entry(step, {"fc": torch.ones(2)}))
    run.finish()
    assert [row["torchhook/step"] for row in ours(run)] == [1]


def test_without_a_run_it_says_what_to_do():
    assert wandb.run is None
    with pytest.raises(RuntimeError, match=r"there is none: call wandb.init\(\) first"):
        WandB().begin({})
