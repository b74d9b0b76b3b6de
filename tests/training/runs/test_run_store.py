"""A run reads back as it was written; what cannot be read says so, and what it holds is never believed."""

import json
import math
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_samples import SITES, entry_at, snapshot_at, states_of, written
from torch import nn

from torchhook import Finding, NotRecordedError, Report, Stat, Trial, check
from torchhook.core.errors import RunError
from torchhook.core.site import Site
from torchhook.rules.history import History
from torchhook.stats import Attention, Covariance, Headroom, Moments, Quantiles, Saturation, TopK
from torchhook.stats.reading import Row, Snapshot
from torchhook.stats.reduce import Reduce
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.blobs import packed, unpacked
from torchhook.training.runs.fields import WIDTH, field_of
from torchhook.training.runs.schema import FILE, VERSION

EVERYTHING = (
    "moments",
    "histogram",
    Quantiles(0.1, 0.9),
    "channels",
    TopK(3),
    Headroom(),
    Saturation(dim=1),
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def test_every_statistic_reads_back_bit_for_bit(folder):
    written(RunLog(folder), range(3), stats=EVERYTHING, size=6).end(Report(), "ended")
    with Run(folder) as run:
        for step in range(3):
            was, now = snapshot_at(step, stats=EVERYTHING, size=6), run.window(step)
            assert states_of(now) == states_of(was)
            assert list(now) == list(was)
            for place in was:
                assert list(now[place]) == list(was[place])
                assert now[place]["quantiles"] == was[place]["quantiles"]
                assert now[place]["topk"] == was[place]["topk"]
                assert (now[place].note, now[place].module_class) == (was[place].note, was[place].module_class)


def test_covariances_which_are_larger_than_all_else_are_not_written(folder):
    written(RunLog(folder), range(2), stats=("moments", Covariance(dim=1)), size=6).end(Report(), "ended")
    with Run(folder) as run:
        assert {name for reading in run.window(1).values() for name in reading} == {"moments"}


def test_states_that_come_back_merge_as_before(folder):
    written(RunLog(folder), range(4), stats=EVERYTHING, size=6)
    with Run(folder) as run:
        before = History(windows=[(step, snapshot_at(step, stats=EVERYTHING, size=6)) for step in range(4)])
        assert states_of(run.history().whole()) == states_of(before.whole())


def test_places_come_in_their_order_whatever_their_states_are_like(folder):
    log, reduce = RunLog(folder), Reduce("channels")
    log.begin({})
    for number, width in enumerate((50, 2, 30, 2)):
        reduce.cell(Site(str(number)), nn.Linear(1, 1)).update(torch.randn(3, width))
    log.write(Entry(0, 0.0, reduce.snapshot()))
    with Run(folder) as run:
        assert list(run.window(0)) == [(str(number), "output") for number in range(4)] == list(run.places)


def test_attention_and_what_only_some_windows_have(folder):
    log = written(RunLog(folder), [0])
    reduce = Reduce(Attention())
    reduce.cell(Site("attn", "attention"), nn.Identity()).update(torch.randn(1, 2, 4, 4))
    rows = {**snapshot_at(1).rows, **reduce.snapshot().rows}
    log.write(Entry(1, 0.0, Snapshot(rows)))
    log.write(Entry(2, 0.0, snapshot_at(2, stats=("moments", "channels"))))
    log.write(entry_at(3))
    with Run(folder) as run:
        assert ("attn", "attention") not in run.window(0).rows
        assert torch.equal(
            run.window(1)["attn", "attention"]["attention"].entropy,
            reduce.snapshot()["attn", "attention"]["attention"].entropy,
        )
        assert [list(run.window(step)["head"]) for step in (1, 2, 3)] == [
            ["moments"],
            ["moments", "channels"],
            ["moments"],
        ]


def test_everything_else_reads_back(folder):
    log = written(RunLog(folder), range(0, 30, 10))
    first = Finding("TH201", "error", "61 % never fire", "head", 10, {"share": 0.61, "list": [1, 2]}, "Warm up.")
    tried = Trial("learning rate raised tenfold", without=2.28, repaired=0.31, steps=100)
    second = Finding("TH601", "warning", "the loss does not fall", step=20, affected=(first,), tried=tried)
    log.found(first)
    log.found(second)
    log.keep(Report((first,), "Net", checked=("TH201",), losses={0: 9.0}), 20)
    with Run(folder) as run:
        assert run.state == "running" and run.ended is None and run.started > 1e9
        assert run.about == {"model": "Net", "settings": {"lr": 0.1}} and run.model == "Net"
        assert run.steps == [0, 10, 20] and run.times == {0: 1000.0, 10: 1010.0, 20: 1020.0}
        assert run.losses == {0: 1.0, 10: 1 / 11, 20: 1 / 21}
        assert run.rates == {0: 0.0, 10: 0.01, 20: 0.02}
        assert run.findings == [first, second]
        assert run.report == Report((first,), "Net", checked=("TH201",), losses=run.losses)
        assert list(run.places) == [*((site, "output") for site in SITES), *((site, "param") for site in SITES)]
        assert run.places["head", "output"].label == "Linear"
        assert [window.step for window in run.windows()] == run.steps
    log.end(Report((second,), "Net"), "failed")
    with Run(folder / FILE) as run:
        assert run.state == "failed" and run.ended >= run.started and run.report.findings == (second,)
    assert [file.name for file in folder.iterdir()] == [FILE]


def test_findings_from_before_repairs_were_tried_are_read(folder):
    found = Finding("TH201", "error", "61 % never fire", "head")
    written(RunLog(folder), [0]).found(found)
    with closing(sqlite3.connect(folder / FILE)) as db, db:
        data = json.loads(db.execute("SELECT data FROM findings").fetchone()[0])
        del data["findings"][0]["tried"]
        db.execute("UPDATE findings SET data = ?", [json.dumps(data)])
    with Run(folder) as run:
        assert run.findings == [found]


def test_losses_that_are_not_finite_and_steps_without_one(folder):
    log = RunLog(folder)
    log.begin({})
    log.write(Entry(3, 0.0, Snapshot({}), losses={1: math.nan, 2: math.inf, 3: -math.inf}))
    log.write(Entry(4, 0.0, Snapshot({})))
    with Run(folder) as run:
        assert math.isnan(run.losses[1]) and run.losses[2] == math.inf and run.losses[3] == -math.inf
        assert 4 not in run.losses and run.rates == {} and run.steps == []  # in which nothing was measured


def test_a_finding_is_known_by_its_code_and_place(folder):
    log = written(RunLog(folder), [0])
    for message in ("first", "second"):
        log.found(Finding("TH201", "error", message, site="head"))
    log.found(Finding("TH201", "error", "elsewhere", site="conv"))
    with Run(folder) as run:
        assert [finding.message for finding in run.findings] == ["second", "elsewhere"]


def test_rules_find_in_a_run_what_they_find_live(folder):
    log, live = RunLog(folder), History()
    log.begin({})
    for step in range(8):
        reduce = Reduce("moments", "channels")
        reduce.cell(Site("relu"), nn.ReLU()).update((torch.randn(64, 8) - 100).relu())
        snapshot = reduce.snapshot()
        live.add(step, snapshot, loss=1.0)
        log.write(Entry(step, 0.0, snapshot, losses={step: 1.0}))
    with Run(folder) as run:
        found = check(run.history())
    assert found == check(live) and any(finding.code == "TH201" for finding in found.findings)


def test_a_statistic_that_nobody_knows_is_kept_and_left_out(folder):
    class Own(Stat):
        name, width = "own", 2

        def update(self, state, x):
            state += torch.tensor([x.sum(), x.numel()])

        def compute(self, state):
            return float(state[0])

    written(RunLog(folder), [0], stats=("moments", Own()))
    with Run(folder) as run:
        assert list(run.window(0)["head"]) == ["moments"]
        with pytest.raises(NotRecordedError, match="'own' was not collected"):
            run.window(0)["head"]["own"]
        block, other = run.blocks("own")
        assert [*block.places, *other.places] == list(run.places) and block.states.shape == (1, 3, 2)
        assert torch.equal(block.states[0, 2], snapshot_at(0, stats=("moments", Own()))["head"].state("own"))


def test_what_failed_is_known(folder):
    log = RunLog(folder)
    log.begin({})
    rows = {place: row._replace(failed={"channels": "RuntimeError: no"}) for place, row in snapshot_at(0).rows.items()}
    log.write(Entry(0, 0.0, Snapshot(rows)))
    with Run(folder) as run:
        assert run.window(0)["head"]._row.failed == {"channels": "RuntimeError: no"}
        assert any(finding.code == "TH000" for finding in check(run.history()).findings)


def test_states_of_two_devices_are_merged(folder):
    log = RunLog(folder)
    log.begin({})
    (place, row), *_ = snapshot_at(0).rows.items()
    other = snapshot_at(1).rows[place]
    both = Row(row.stats, row.label, row.note, {"moments": [*row.states["moments"], *other.states["moments"]]})
    log.write(Entry(0, 0.0, Snapshot({place: both})))
    with Run(folder) as run:
        assert run.window(0)[place].count == 400
        assert torch.equal(run.window(0)[place].state("moments"), Snapshot({place: both})[place].state("moments"))


def test_a_series_is_what_the_windows_say(folder):
    log = written(RunLog(folder), range(0, 40, 2))
    log.write(entry_at(40, sites=("late", "head")))
    with Run(folder) as run:
        for field in ("mean", "std", "l2", "zero_fraction", "kurtosis", "count"):
            steps, paths, values = run.series(field)
            assert steps == run.steps and paths == [*SITES, "late"] and values.shape == (4, 21)
            for row, path in enumerate(paths):
                for column, step in enumerate(steps):
                    window = run.window(step)
                    said = getattr(window[path]["moments"], field) if (path, "output") in window.rows else math.nan
                    assert values[row, column].item() == pytest.approx(said, rel=1e-15, nan_ok=True)
        steps, _, values = run.series("std", port="param", most=5)
        assert 3 <= len(steps) <= 5 and (steps[0], steps[-1]) == (0, 40) and not values[0, :-1].isnan().any()
        assert run.series("mean", port="update").values.shape == (0, 21)
        with pytest.raises(ValueError, match="field must be one of count, mean.*not 'median'"):
            run.series("median")
        with pytest.raises(ValueError, match="most must be at least 2"):
            run.series("mean", most=1)


def test_of_several_tensors_a_series_shows_the_first(folder):
    log, reduce = RunLog(folder), Reduce("moments")
    log.begin({})
    for number in (1, 0):
        reduce.cell(Site("lstm"), nn.LSTM(1, 1), (number,)).update(torch.full((2,), float(number)))
    log.write(Entry(0, 0.0, reduce.snapshot()))
    with Run(folder) as run:
        assert run.series("mean").paths == ["lstm"] and run.series("mean").values.tolist() == [[1.0]]


@pytest.mark.parametrize(
    "values",
    [[1.0, 2.0, 4.0], [math.nan, math.inf, -math.inf], [math.nan, 3.0], [0.0, 0.0], [1e200, -1e200], [5.0], []],
)
def test_fields_are_those_of_the_statistic(values):
    state = Moments().empty(torch.zeros(1))
    Moments().update(state, torch.tensor(values, dtype=torch.float64))
    said = vars(Moments().compute(state))
    found = {name: field_of(torch.stack([state, state]), name)[1].item() for name in said}
    if not values:  # where nothing was seen, counts are not known either
        said = dict.fromkeys(said, math.nan)
    assert found == pytest.approx(said, rel=1e-15, nan_ok=True)
    assert len(state) == WIDTH


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_packing_keeps_every_bit(data):
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
    places, windows = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    size = windows * places * math.prod(shape)
    bits = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=size, max_size=size))
    states = torch.tensor(bits, dtype=torch.int64).view(torch.float64).view(windows, places, *shape)
    again = unpacked([packed(window) for window in states], places, shape)
    assert again.shape == states.shape and again.dtype == torch.float64
    assert torch.equal(again.view(torch.int64), states.view(torch.int64))


def test_packing_takes_strides_as_they_are():
    states = torch.arange(24.0, dtype=torch.float64).view(4, 6).T[::2]
    assert torch.equal(unpacked([packed(states)], 3, (4,))[0], states)
    assert torch.equal(unpacked([packed(torch.arange(3))], 3, ())[0], torch.arange(3.0, dtype=torch.float64))


def test_a_blob_is_not_believed():
    blob = packed(torch.zeros(2, 1000))
    with pytest.raises(ValueError, match="corrupt blob: expected 8,000 bytes, got"):
        unpacked([blob], 1, (1000,))  # it holds more
    with pytest.raises(ValueError, match="expected"):
        unpacked([blob], 3, (1000,))
    with pytest.raises(ValueError, match="corrupt"):
        unpacked([b"text"], 1, (1,))
    for shape in ((2**40,), (-1, -12), (-1,)):
        with pytest.raises(ValueError, match="corrupt layout"):
            unpacked([blob], 1, shape)


HOSTILE = [
    "<script>alert(1)</script>",
    "new\nline",
    "'; DROP TABLE states; --",
    "x" * 1000,
    "nul\0",
    "half\ud800",
    "é日本",
]


def test_hostile_names_are_names(folder):
    log = RunLog(folder)
    log.begin({"model": HOSTILE[0] + "\ud800", "names": HOSTILE, ("odd",): {1: object}, "loop": (loop := [])})
    loop.append(loop)
    log.begin({"loop": loop})
    log.write(entry_at(0, sites=HOSTILE))
    log.write(entry_at(1, sites=HOSTILE))
    for name in HOSTILE:
        log.found(Finding("TH201", "error", name, site=name, evidence={name: name}))
    log.end(Report(tuple(Finding("TH201", "error", name, site=name) for name in HOSTILE), HOSTILE[0]), "ended")
    with Run(folder) as run:
        stored = [name.replace("\ud800", "\\ud800") for name in HOSTILE]
        assert [path for path, port in run.places if port == "output"] == stored
        assert run.series("mean").paths == stored and run.steps == [0, 1]
        assert states_of(run.window(1)) == {
            (path.replace("\ud800", "\\ud800"), port): found
            for (path, port), found in states_of(snapshot_at(1, sites=HOSTILE)).items()
        }
        assert [finding.site for finding in run.findings] == HOSTILE == [f.site for f in run.report.findings]
        assert run.about["names"] == HOSTILE and "<script>" in run.model
        shown = run._repr_html_()
        assert "<script>" not in shown and "&lt;script&gt;" in shown and "\ud800" not in shown
        assert "\ud800" not in repr(run) and "\n" not in repr(run)


def test_what_is_no_run_says_so(tmp_path):
    def broken(name, content):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(content)
        with pytest.raises(RunError) as raised:
            Run(tmp_path / name).losses  # noqa: B018
        return str(raised.value)

    good = written(RunLog(tmp_path / "good"), range(20))
    good.end(Report(), "ended")
    whole = (tmp_path / "good" / FILE).read_bytes()
    assert "is not a run, or is corrupt (file is not a database)" in broken(
        "text", b"some text, which is not a database" * 9
    )
    assert "is not a run of torchhook" in broken("empty", b"")
    assert ".recover" in broken("garbage", b"SQLite format 3\0" + bytes(range(256)) * 64)
    assert "is corrupt" in broken("half", whole[: len(whole) // 2])
    with pytest.raises(RunError, match="there is no run in '.*nowhere'.*torchhook runs list"):
        Run(tmp_path / "nowhere")
    with pytest.raises(RunError, match="there is no run"):
        Run(tmp_path / "nowhere" / FILE)
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE life (id)")
    other.commit()
    other.close()
    assert "is not a run of torchhook" in broken("other", (tmp_path / "other.sqlite").read_bytes())


def test_a_newer_one_says_to_update(folder):
    written(RunLog(folder), [0]).end(Report(), "ended")
    with sqlite3.connect(folder / FILE) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")
    db.close()
    with pytest.raises(RunError, match=f"newer torchhook .version {VERSION + 1}.*update torchhook"):
        Run(folder)
    before = (folder / FILE).read_bytes()
    log = RunLog(folder)
    with pytest.warns(UserWarning, match="newer"):
        log.begin({})
    log.write(entry_at(1))
    assert (folder / FILE).read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE layouts SET shape = '[1000000000000]'",
        "UPDATE layouts SET shape = '{}'",
        "UPDATE layouts SET places = '[77]'",
        "UPDATE places SET stats = '[1]'",
        "UPDATE states SET data = x'00'",
    ],
)
def test_tables_that_somebody_changed_are_a_broken_run(folder, change):
    written(RunLog(folder), [0]).end(Report(), "ended")
    with sqlite3.connect(folder / FILE) as db:
        db.execute(change)
    db.close()
    with Run(folder) as run, pytest.raises(RunError, match="corrupt"):
        run.window(0)


def test_reading_leaves_no_trace_and_needs_no_right_to_write(folder):
    def files(folder):
        return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.endswith("-shm")}

    ended, watched, left = (folder.with_name(name) for name in ("ended", "watched", "left"))
    written(RunLog(ended), range(3)).end(Report(), "ended")
    log = written(RunLog(watched), range(3))
    with Run(watched) as run:  # who reads keeps it from becoming one plain file
        assert run.steps == [0, 1, 2]
        log.end(Report(), "ended")
        assert run.state == "ended"
    written(RunLog(left), range(3))._close()  # nobody has ended it
    assert [list(files(one)) for one in (ended, left)] == [[FILE], [FILE]]
    for one in (ended, watched, left):
        before = files(one)
        with Run(one) as run:
            assert run.steps == [0, 1, 2] and len(run.losses) == 3 and run.window(2)
        assert before == files(one)


def test_a_run_copied_without_its_small_files_opens(folder, tmp_path):
    log = written(RunLog(folder), range(3))
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (FILE, f"{FILE}-wal"):
        (copy / name).write_bytes((folder / name).read_bytes())
    log.end(Report(), "ended")
    with Run(copy) as run:
        assert run.steps == [0, 1, 2] and run.state == "running"


def test_a_run_in_the_making_is_followed(folder):
    log = RunLog(folder)
    log.begin({"model": "Net"})
    with Run(folder) as run:
        assert run.steps == [] and run.report is None and run.history().windows == []
        with pytest.raises(NotRecordedError, match="step 3 was not measured.*nothing was"):
            run.window(3)
        log.write(entry_at(3))
        assert run.steps == [3]
        with pytest.raises(NotRecordedError, match="; 3 is the nearest"):
            run.window(4)
        log.end(Report(), "ended")
        assert run.state == "ended"


def test_threads_may_share_a_run(folder):
    log = written(RunLog(folder), range(5))
    failed = []

    def look():
        try:
            for _ in range(20):
                assert len(run.steps) >= 5 and run.series("mean").values.shape[0] == 3
        except BaseException as error:
            failed.append(error)

    with Run(folder) as run:
        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for step in range(5, 30):
            log.write(entry_at(step))
        for thread in threads:
            thread.join()
    assert not failed


def test_a_run_that_is_there_is_continued(folder):
    written(RunLog(folder), range(10)).end(Report(), "interrupted")
    log = RunLog(folder)
    log.begin({"resumed": True})
    with Run(folder) as run:
        assert run.state == "running" and run.ended is None and run.about["model"] == "Net" and run.about["resumed"]
    log.write(Entry(9, 5.0, snapshot_at(99), losses={9: 7.0}))
    log.write(entry_at(10))
    assert (folder / f"{FILE}-wal").exists()
    with Run(folder) as run:
        assert run.steps == list(range(11)) and run.losses[9] == 7.0
        assert states_of(run.window(9)) == states_of(snapshot_at(99))
        assert states_of(run.window(10)) == states_of(snapshot_at(10))


def test_any_folder_will_do(tmp_path):
    folder = tmp_path / "a?b#c%20 d&mode=rwc;é"
    written(RunLog(folder), range(2)).end(Report(), "ended")
    with Run(folder) as run:
        assert run.steps == [0, 1]
    assert [file.name for file in folder.iterdir()] == [FILE]


def test_who_wrote_it_is_gone(folder):
    script = (
        "import os, sys; from torchhook.training.runs import RunLog;"
        f"log = RunLog({str(folder)!r}); log.begin({{}}); print('written', flush=True); sys.stdin.read(1); os._exit(1)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"written\n"
    with Run(folder) as run:
        assert run.state == "running"
        process.communicate(b"\n")
        assert run.state == "killed"
        owner = run._life().owner
    assert owner["pid"] == process.pid


def test_nothing_is_unpickled(folder, monkeypatch):
    import pickle

    def refused(*args, **kwargs):
        raise AssertionError("pickle")

    log = written(RunLog(folder), range(2), stats=EVERYTHING, size=6)
    log.end(Report((Finding("TH201", "error", "x"),)), "ended")
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refused)
    monkeypatch.setattr(torch, "load", refused)
    with Run(folder) as run:
        assert run.history().windows and run.report and run.about and run.series("mean").steps
    assert b"\x80\x02" + b"c" not in (folder / FILE).read_bytes()


def test_max_bytes_must_be_a_size(folder):
    for wrong in (0, 2**20 - 1, -1, True, "256MiB", 1e9, math.nan):
        with pytest.raises(ValueError, match="max_bytes must be an integer of at least 1048576"):
            RunLog(folder, max_bytes=wrong)
