"""Runs of strangers: whatever one contains, it is an error of that run alone, and soon."""

import json
import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from run_samples import written
from strange_runs import READ, REFUSED, UNLISTED, good

from torchhook import Report, render
from torchhook.core.errors import RunError
from torchhook.render.to_json import as_json
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.folders import find, prunable, summaries
from torchhook.training.runs.schema import FILE

STRANGE = {**REFUSED, **READ, **UNLISTED}
SOON = 8.0  # seconds: less than a statement may take


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return good(tmp_path_factory.mktemp("healthy") / "run")


@pytest.fixture
def runs(tmp_path, request, healthy):
    """Two good runs, and one that was changed."""
    for name in ("first", "strange", "last"):
        shutil.copytree(healthy, tmp_path / "runs" / name)
    STRANGE[request.param](tmp_path / "runs" / "strange")
    return tmp_path / "runs"


def strange_in(root):
    (folder,) = {*root.iterdir()} - {root / "first", root / "last"}
    return folder


strange = pytest.mark.parametrize("runs", STRANGE, indirect=True)


@strange
def test_it_hides_no_others_in_a_list(runs, command, request):
    began = time.monotonic()
    name = request.node.callspec.params["runs"]
    found = {run.name: run for run in summaries(runs)}
    assert found["first"].model == found["last"].model == "Net" and found["last"].state == "ended"
    assert len(find(runs)) == len(found) == (2 if name in UNLISTED else 3)
    assert runs / "first" in prunable(runs, keep=0)
    if name not in UNLISTED:
        run = found[strange_in(runs).name]
        assert bool(run.error) == (name in REFUSED) and (run.state == "unreadable") == (name in REFUSED)
    done = command("runs", "list", runs)
    lines = done.out.splitlines()
    assert (done.code, done.err, len(lines)) == (0, "", 1 + len(found)) and "\x1b" not in done.out
    assert sum(line.startswith(("first  ", "last  ")) and " ended " in line for line in lines) == 2
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("runs", REFUSED, indirect=True)
def test_the_list_says_why(runs, command):
    (line,) = (line for line in command("runs", "list", runs).out.splitlines() if " unreadable " in line)
    assert re.search(r"\d:\d\d +'run.sqlite' (is|was|takes) \w+", line)


@pytest.mark.parametrize("runs", REFUSED, indirect=True)
def test_why_is_answered_of_the_newest_run_that_can_be_read(runs, command):
    for is_linked in (False, True):
        if is_linked:
            (runs / "latest").symlink_to("strange")
        done = command("why", runs)
        assert (done.code, done.out.partition("\n")[0]) == (1, f"Net: 1 error, in {runs / 'last'}, ended at step 2")
        assert done.err.startswith(f"torchhook: skipped '{runs}/strange': 'run.sqlite' ")
        assert done.err.count("\n") == 1


@pytest.mark.parametrize("runs", {**READ, **UNLISTED}, indirect=True)
def test_why_is_answered_or_refused_in_one_line(runs, command):
    done = command("why", runs)
    if done.code == 2:
        assert "'run.sqlite' is not a run, or is corrupt" in done.said.replace(f"{runs}/strange/", "") and not done.out
    else:
        assert (
            re.match(r"[^\n\x1b]+: 1 error, in [^\n\x1b]+, (ended|running) at step \d+\n", done.out) and done.code == 1
        )


@strange
def test_every_reader_works_or_says_that_the_run_is_corrupt(runs):
    began, before = time.monotonic(), contents(runs)
    try:
        run = Run(strange_in(runs))
    except RunError:
        return
    with run:
        for name in dir(Run):
            if isinstance(getattr(Run, name), property):
                read(lambda name=name: getattr(run, name))
        read(lambda: json.dumps(run.why().to_dict()))
        read(lambda: str(run.why()))
        read(lambda: (repr(run), run._repr_html_()))
        read(lambda: str(run.report))
        read(lambda: all(save(run.judged()) for save in (render.html, render.json, render.junit, render.markdown)))
        read(lambda: as_json(run.why().to_dict()).encode())
        read(lambda: list(run.windows()))
        read(lambda: [run.window(step).rows for step in run.steps])
        read(lambda: run.series("mean"))
        read(lambda: list(run.blocks()))
        read(run.history)
        read(run.loss_curve)
    assert time.monotonic() - began < SOON and contents(runs) == before


def contents(folder):
    """All files, and when each was written."""
    return {path: path.lstat().st_mtime_ns for path in folder.rglob("*")}


def read(work):
    try:
        work()
    except RunError as error:
        assert FILE in str(error)


def test_a_statement_that_takes_too_long_is_interrupted(tmp_path, monkeypatch):
    folder = good(tmp_path / "run")
    with sqlite3.connect(folder / FILE) as db:
        many = "WITH RECURSIVE c(n) AS (SELECT 9 UNION ALL SELECT n + 1 FROM c LIMIT 1000000) SELECT n, 1.0 FROM c"
        db.execute(f"INSERT INTO losses {many}")
    db.close()
    monkeypatch.setattr("torchhook.training.runs.location._MOST", 0.05)
    with Run(folder) as run:
        with pytest.raises(RunError, match=r"run.sqlite' takes too long to read: more than 0.05 s"):
            _ = run.losses
        assert run.state == "ended"


def test_a_thousand_short_statements_are_interrupted_too(tmp_path, monkeypatch):
    """Without an index, each step of a series is a look at the whole table."""
    folder = good(tmp_path / "run")
    with sqlite3.connect(folder / FILE) as db:
        count = "WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c LIMIT {}) SELECT {} FROM c"
        db.execute(f"INSERT OR REPLACE INTO windows {count.format(1000, 'n, 1.0, NULL')}")
        db.execute("DROP TABLE states")
        db.execute(f"CREATE TABLE states AS {count.format(50_000, '-1 - n AS step, 1 AS layout, 0 AS data')}")
    db.close()
    monkeypatch.setattr("torchhook.training.runs.location._MOST", 0.2)
    with Run(folder) as run, pytest.raises(RunError, match="takes too long to read"):
        run.series("mean", most=None)


def test_a_table_without_an_index_is_listed_at_once(tmp_path):
    folder = good(tmp_path / "run")
    with sqlite3.connect(folder / FILE) as db:
        db.execute("DROP TABLE losses")
        many = "WITH RECURSIVE c(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM c LIMIT 1000000)"
        db.execute(f"CREATE TABLE losses AS {many} SELECT n AS step, 1.0 AS loss FROM c")
    db.close()
    with Run(folder) as run:
        began = time.process_time()
        once = run.last_step
        whole = time.process_time() - began
        began = time.process_time()
        assert len(run.loss_curve()) == 60 and once == 999_999
        assert time.process_time() - began < 10 * whole, "not a look at the whole table for each of 60 points"


def test_a_run_whose_log_has_no_index_is_read_again_when_it_goes_on(tmp_path):
    folder = good(tmp_path / "run")
    READ["a log without its index"](folder)
    with Run(folder) as run:
        assert run.last_step == 2 and not (folder / f"{FILE}-shm").exists()
        log = written(RunLog(folder), range(3, 6))
        assert run.last_step == 5 and run.state == "running"
        log.end(Report(), "ended")
        assert run.state == "ended"


def test_a_trigger_is_not_run_by_the_writer_either(tmp_path):
    folder = good(tmp_path / "run")
    before = Path(folder, FILE).read_bytes()
    REFUSED["a trigger"](folder)
    changed = Path(folder, FILE).read_bytes()
    assert changed != before
    log = RunLog(folder)
    with pytest.warns(UserWarning, match=r"cannot be written .*is refused: it has 't' \(trigger\)"):
        log.begin({"model": "Net"})
    assert Path(folder, FILE).read_bytes() == changed and "refused" in log.unwritten


@pytest.mark.parametrize(
    "strange", ["a journal that has another file deleted", "an index that is also a file elsewhere"]
)
def test_no_file_of_the_user_is_changed(tmp_path, command, strange):
    folder = good(tmp_path / "run")
    REFUSED[strange](folder)
    with pytest.raises(RunError, match="refused") as refused:
        Run(folder)
    assert "sqlite3" not in str(refused.value), "which would change it"
    assert "unreadable" in command("runs", "list", tmp_path).out
    log = RunLog(folder)
    with pytest.warns(UserWarning, match=r"cannot be written .*is refused"):
        log.begin({"model": "Net"})
    assert (folder / "victim.txt").read_text() == "precious"


def test_what_is_not_a_file_is_said_without_advice(tmp_path):
    folder = good(tmp_path / "run")
    REFUSED["a journal that is a pipe"](folder)
    with pytest.raises(RunError, match=r"run.sqlite' is refused: 'run.sqlite-journal' is not a plain file$"):
        Run(folder)
