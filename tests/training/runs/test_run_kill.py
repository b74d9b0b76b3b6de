"""Writers that are killed at any moment; disks that are full, read-only or swept: runs open, and trainings go on."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from killed_writers import snapshot_of
from run_samples import entry_at, snapshot_at, states_of, written

from torchhook import Finding, Report
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog, schema
from torchhook.training.runs.folders import new_folder
from torchhook.training.runs.schema import FILE

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NUMBERS = {"all": "50", "thinned": "8", "journal": "15"}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """What became of some writers: their folders, and what they had been told was written."""
    done = subprocess.run(
        [sys.executable, HERE / "killed_writers.py", tmp_path_factory.mktemp("runs"), *map("=".join, NUMBERS.items())],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(end["signal"] == 9 for end in ends), done.stderr
    by_how = {how: [end for end in ends if end["how"] == how] for how in NUMBERS}
    assert {how: str(len(some)) for how, some in by_how.items()} == NUMBERS
    return by_how


def is_sound(folder):
    """By SQLite's own check, in a copy: it may have to be mended first."""
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy)
    db = sqlite3.connect(copy / FILE)
    (said,) = db.execute("PRAGMA integrity_check").fetchone()
    db.close()
    return said == "ok"


def opened(ends):
    """Those that had begun, which all have a run that opens; with what each had been told."""
    for end in ends:
        folder, told = Path(end["folder"]), end["told"]
        if ["begun", "0"] not in told:
            continue
        assert is_sound(folder)
        with Run(folder) as run:
            assert run.state == "killed" and run.model == "Net"
            steps = [int(step) for what, step in told if what == "step"]
            assert {int(step) for what, step in told if what == "finding"} <= {found.step for found in run.findings}
            assert len(run.findings) <= len([step for step in steps if step % 3 == 0]) + 1
            assert all(sample.file.read_bytes()[-8:-4] == b"IEND" for sample in run.samples)
            if len(steps) > 1:
                assert int(run.report.notes[0]) >= steps[-2]
            yield run, steps


def test_nothing_that_was_written_is_lost_when_the_writer_is_killed(ends):
    lengths = Counter()
    for run, steps in opened(ends["all"]):
        assert run.steps in (steps, [*steps, len(steps)])  # what was written last may not have been told
        assert list(run.losses) == run.steps
        for step in run.steps[-8:]:
            assert states_of(run.window(step)) == states_of(snapshot_of("all", step))
        lengths[len(steps)] += 1
    assert sum(lengths.values()) > 25 and len(lengths) > 10  # they were killed at different moments
    for end in ends["all"]:  # and a run that has a file opens, however early it was
        if Path(end["folder"], FILE).exists():
            Run(end["folder"]).close()


def test_what_a_thinning_left_is_whole_when_the_writer_is_killed(ends):
    thinned = 0
    for run, steps in opened(ends["thinned"]):
        if steps:
            assert run.steps[0] == 0 and run.steps[-1] in (steps[-1], steps[-1] + 1)
        thinned += len(run.steps) < len(steps)
        for step in run.steps[::50]:
            assert states_of(run.window(step)) == states_of(snapshot_of("thinned", step))
    assert thinned


def test_it_is_the_same_without_a_write_ahead_log(ends):
    hot = 0
    for run, steps in opened(ends["journal"]):
        assert not (run.folder / f"{FILE}-wal").exists()
        assert run.steps in (steps, [*steps, len(steps)])
        hot += run._source._copy is not None
        for step in run.steps[-3:]:
            assert states_of(run.window(step)) == states_of(snapshot_of("journal", step))
    assert hot  # some were killed in the middle of a transaction, and put in order


FULL = """
import resource, signal, sys, warnings
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import torch
from run_samples import entry_of, snapshot_at
from torchhook import Finding, Report
from torchhook.training.runs import RunLog
torch.set_num_threads(1)
snapshot = snapshot_at(0, sites=[f"layer{number}" for number in range(20)])
for room in map(int, sys.argv[2:]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = RunLog(f"{sys.argv[1]}/{room}")
        log.begin({"model": "Net"})
        for step in range(100):
            log.write(entry_of(step, snapshot))
        log.found(Finding("TH201", "error", "late"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        log.write(entry_of(999, snapshot))
        log.end(Report(model="Net"), "ended")
    print(*[str(warning.message) for warning in caught], sep=" and ")
"""


def test_a_full_disk_is_one_warning(tmp_path):
    rooms = 4096, 200_000  # not enough to begin, and not enough for all
    paths = os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path, *map(str, rooms)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    for room, said in zip(rooms, done.stdout.splitlines(), strict=True):
        assert (
            said.count("cannot be written") == 1
            and "is lost; the training goes on" in said
            and " and the run" not in said
        )
        folder = tmp_path / str(room)
        with Run(folder) as run:
            assert run.state == "ended" and run.model == "Net" and run.steps[-1] == 999
            first = run.steps[:-1]
            assert (room == rooms[0]) == (not first) and set(first) < set(range(100))
            snapshot = snapshot_at(0, sites=[f"layer{number}" for number in range(20)])
            assert all(states_of(run.window(step)) == states_of(snapshot) for step in first[::10])
        assert is_sound(folder)


def all_of_it(log):
    """Everything that a log may be told."""
    log.begin({"model": "Net"})
    for step in range(3):
        log.write(Entry(**{**vars(entry_at(step)), "maps": {"conv": torch.rand(2, 4, 4)}}))
    log.found(Finding("TH201", "error", "x"))
    log.keep(Report(), 3)
    log.end(Report(), "ended")


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "run", tmp_path / "file", new_folder(tmp_path / "file", "net")):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            all_of_it(RunLog(folder))
        (warning,) = caught
        assert "no run is recorded" in str(warning.message) and "the training goes on" in str(warning.message)
        assert warning.filename == __file__
    assert (tmp_path / "file").read_text() == "not a folder"


@pytest.fixture
def read_only():
    """Makes a folder read-only, for root too: the process is nobody meanwhile."""
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)

        @contextmanager
        def until(folder):
            me = os.geteuid()
            folder.chmod(0o555)
            if me == 0:
                os.seteuid(65534)
            try:
                yield
            finally:
                os.seteuid(me)
                folder.chmod(0o755)

        yield Path(root), until


def test_a_folder_that_is_read_only_is_one_warning(read_only):
    root, until = read_only
    run = root / "run"
    run.mkdir()
    snapshot_at(0)  # kernels are built for the first one, which nobody may
    with until(root), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_of_it(RunLog(new_folder(root, "net")))
    assert len(caught) == 1 and "no run is recorded" in str(caught[0].message)
    with until(run), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_of_it(RunLog(run))
    assert len(caught) == 1 and "the run is lost; the training goes on" in str(caught[0].message)
    assert list(run.iterdir()) == []


def test_a_run_in_a_folder_that_is_read_only_opens(read_only):
    root, until = read_only
    written(RunLog(root / "ended"), range(3)).end(Report(), "ended")
    written(RunLog(root / "left"), range(3))._close()
    live = written(RunLog(root / "live"), range(3))
    (root / "copied").mkdir()
    for name in (FILE, f"{FILE}-wal"):
        shutil.copy(root / "live" / name, root / "copied" / name)
    for name in ("ended", "left", "live", "copied"):
        before = sorted((root / name).iterdir())
        with until(root / name), Run(root / name) as run:
            assert run.steps == [0, 1, 2] and states_of(run.window(2)) == states_of(snapshot_at(2))
        assert sorted((root / name).iterdir()) == before
    live.end(Report(), "ended")


def test_a_run_that_cannot_be_made_whole_is_not_made(tmp_path, monkeypatch):
    draw = schema._draw

    def full(file, journal):
        draw(file, journal)
        raise OSError("full")

    monkeypatch.setattr(schema, "_draw", full)
    with pytest.warns(UserWarning, match="cannot be written .full.: the run is lost"):
        RunLog(tmp_path / "run").begin({})
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / FILE).write_text("somebody's own text, which is not a database" * 100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        all_of_it(RunLog(tmp_path))
    assert len(caught) == 1 and "not a database" in str(caught[0].message)
    assert (tmp_path / FILE).read_text().startswith("somebody's own")


def test_a_file_that_is_deleted_meanwhile_begins_anew(tmp_path):
    log = written(RunLog(tmp_path / "run"), range(3))
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    with pytest.warns(UserWarning, match="was deleted; its content is lost, and a new file is started"):
        log.write(entry_at(3))
    log.write(entry_at(4))
    log.end(Report(), "ended")
    with Run(tmp_path / "run") as run:
        assert run.steps == [3, 4] and run.state == "ended" and run.model == "Net"
        assert states_of(run.window(4)) == states_of(snapshot_at(4))


def test_a_folder_that_is_deleted_meanwhile_stays_so(tmp_path):
    log = written(RunLog(tmp_path / "run"), range(3))
    shutil.rmtree(tmp_path / "run")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log.write(entry_at(3))
        log.write(entry_at(4))
        log.end(Report(), "ended")
    assert ["was deleted" in str(warning.message) for warning in caught] == [True, False]
    assert not (tmp_path / "run").exists()


def test_somebody_who_holds_the_lock_is_waited_for_and_then_given_up(tmp_path):
    log = written(RunLog(tmp_path / "run"), range(2))
    other = sqlite3.connect(tmp_path / "run" / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(UserWarning, match="database is locked.*step 2 is lost"):
        log.write(entry_at(2))
    other.execute("ROLLBACK")
    other.close()
    log.write(entry_at(3))
    with Run(tmp_path / "run") as run:
        assert run.steps == [0, 1, 3]
        assert states_of(run.window(3)) == states_of(snapshot_at(3))


def test_a_write_that_fails_half_way_leaves_nothing(tmp_path, monkeypatch):
    log = written(RunLog(tmp_path / "run"), range(2))
    new_places = entry_at(2, sites=("new", "newer"))
    with monkeypatch.context() as patched:
        patched.setattr(
            "torchhook.training.runs.database.Database._layout", lambda *_: (_ for _ in ()).throw(OSError("no"))
        )
        with pytest.warns(UserWarning, match="cannot be written .no.: what was measured in step 2 is lost"):
            log.write(new_places)
    with Run(tmp_path / "run") as run:
        assert run.steps == [0, 1] and ("new", "output") not in run.places and 2 not in run.losses
    log.write(entry_at(3, sites=("new", "head")))
    with Run(tmp_path / "run") as run:
        assert states_of(run.window(3)) == states_of(snapshot_at(3, sites=("new", "head")))


SLOW = """
import sys, time, torch
from torchhook import Monitor
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
monitor = Monitor(model, optimizer, every=1000, to=sys.argv[1])
for step in range(10_000):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    monitor.step(loss)
    print(step, flush=True)
    time.sleep(0.02)
"""


def test_the_last_step_of_a_killed_run_is_that_of_its_last_seconds(tmp_path):
    """Although the last measured step is the first."""
    program = [sys.executable, "-c", SLOW, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if int(line) == 250:
                process.kill()
                break
    with Run(tmp_path / "latest") as run:
        assert run.state == "killed" and run.steps[-1] < 100 and run.last_step > 120
