"""A folder with many runs: each is listed at once, read when it has changed, opened when needed and closed again."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from unittest import mock

import pytest
from dashboard_samples import append, ended, garbage, written

from torchhook import Finding, Report
from torchhook.dashboard import catalog
from torchhook.dashboard.library import OPEN, Library
from torchhook.dashboard.pages import runs
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs.folders import delete
from torchhook.training.runs.schema import FILE

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS, WRITTEN, HOUR = 2000, 50, 3600
MOST_FILES = 64


def files_of(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def summaries(library):
    return {line.name: line.summary for line in library.catalog.lines()}


def read(library):
    """Refresh; the runs that were read."""
    with mock.patch.object(catalog, "summarize", side_effect=catalog.summarize) as summarize:
        library.catalog.refresh()
    return sorted(call.args[0].name for call in summarize.call_args_list)


# What is read


def test_runs_are_listed_before_they_are_read(tmp_path):
    for name in ("a", "b", "c"):
        ended(tmp_path / name)
    library = Library(tmp_path)
    library.catalog.refresh(0.0)
    assert summaries(library) == dict.fromkeys("abc") and not library.catalog.is_complete
    library.catalog.refresh()
    assert {found.model for found in summaries(library).values()} == {"Net"} and library.catalog.is_complete


def test_only_runs_that_changed_are_read_again(tmp_path):
    ended(tmp_path / "over")
    log = written(tmp_path / "growing", range(3))
    garbage(tmp_path / "garbage")
    library = Library(tmp_path)
    assert read(library) == ["garbage", "growing", "over"] and read(library) == []
    append(log, [3])  # which is in the log beside the file
    assert read(library) == ["growing"] and summaries(library)["growing"].last_step == 3
    log.found(Finding("TH201", "error", "61 % of the units never fire", "fc", 3))
    assert read(library) == ["growing"] and summaries(library)["growing"].finding.code == "TH201"
    log.end(Report(), "ended")
    assert read(library) == ["growing"] and summaries(library)["growing"].state == "ended"
    assert read(library) == []


def test_the_newest_run_is_read_first(tmp_path):
    for age, name in enumerate(("new", "older", "oldest")):
        ended(tmp_path / name)
        os.utime(tmp_path / name / FILE, (1e9 - age, 1e9 - age))
    assert list(Library(tmp_path).files()) == ["new", "older", "oldest"]
    library = Library(tmp_path)
    with mock.patch.object(catalog, "summarize", side_effect=catalog.summarize) as summarize:
        library.catalog.refresh()
    assert [call.args[0].name for call in summarize.call_args_list] == ["new", "older", "oldest"]


def test_a_run_whose_process_was_killed_is_noticed(tmp_path):
    """Which changes no file: the run is read again after a while."""
    log = written(tmp_path / "net", range(2))
    library = Library(tmp_path)
    assert read(library) == ["net"] and summaries(library)["net"].state == "running"
    with mock.patch("torchhook.training.runs.run.is_gone", return_value=True):
        assert read(library) == []
        with mock.patch.object(catalog, "_AGAIN", 0.0):
            assert read(library) == ["net"]
    assert summaries(library)["net"].state == "killed"
    del log  # which was held until here: a log that is collected closes its file, which changes it


def test_only_lines_that_changed_are_sent(tmp_path):
    ended(tmp_path / "over")
    log = written(tmp_path / "growing", range(3))
    listed = Library(tmp_path).catalog
    listed.refresh()
    edition, version = listed.edition, max(line.version for line in listed.lines())
    assert listed.lines(version) == []
    append(log, [3])
    listed.refresh()
    assert [line.name for line in listed.lines(version)] == ["growing"] and listed.edition == edition
    ended(tmp_path / "new")
    listed.refresh()
    assert listed.edition == edition + 1 and {line.name for line in listed.lines()} == {"growing", "new", "over"}
    delete(tmp_path / "over")
    listed.refresh()
    assert listed.edition == edition + 2 and {line.name for line in listed.lines()} == {"growing", "new"}


def test_the_page_has_the_first_runs_and_the_next_look_brings_the_others(tmp_path):
    for number in range(60):
        ended(tmp_path / f"net-{number}", range(1))
    page = runs.page(Library(tmp_path))
    by_id = {getattr(part, "id", None): part for part in page._traverse()}
    assert len(by_id["runs-grid"].rowData) == 50 and by_id["runs-shown"].data["edition"] == -1


def test_a_row_tells_what_a_curve_cannot_draw(tmp_path):
    log = written(tmp_path / "net", range(2))
    log.write(Entry(2, 0.0, Snapshot({}), losses={2: float("inf")}))
    library = Library(tmp_path)
    library.catalog.refresh()
    (line,) = library.catalog.lines()
    row = runs._row(line)
    assert row["loss"] is None and row["is_broken"] and row["losses"][2] is None
    json.dumps(row, allow_nan=False)


# What is open


def test_runs_that_are_no_longer_needed_are_closed(tmp_path):
    for number in range(2 * OPEN):
        ended(tmp_path / f"net-{number}", range(2))
    library, before = Library(tmp_path), files_of("self")
    for _ in range(2):
        for number in range(2 * OPEN):
            assert library.book(f"net-{number}").sheet("std", "output").steps == [0, 1]  # it is opened again
            assert files_of("self") - before <= OPEN
        library.catalog.refresh()
        assert files_of("self") - before <= OPEN


def test_a_run_that_is_used_stays_open(tmp_path):
    for number in range(2 * OPEN):
        ended(tmp_path / f"net-{number}", range(1))
    library = Library(tmp_path)
    first = library.book("net-0")
    for number in range(2 * OPEN):
        library.book(f"net-{number}")
        assert library.book("net-0") is first


# An hour of 2,000 runs, 50 of them being written

WRITER = """
import itertools, sys, time
sys.path.insert(0, {here!r})
from pathlib import Path
from dashboard_samples import append, written
logs = [written(Path({root!r}) / f"written-{{number:02}}", range(5)) for number in range({count})]
print("begun", flush=True)
for step in itertools.count(5):
    for log in logs:
        append(log, [step])
    time.sleep(5.0)
"""


class Client:
    """What a browser asks of the server: the page at a URL, and the callbacks of what ticks on it."""

    def __init__(self, address):
        self.address = address
        self.callbacks = json.load(urllib.request.urlopen(f"{address}_dash-dependencies"))

    def fire(self, trigger, **states):
        """The answer to a callback; `states` are the properties that it gets, by id with underscores."""
        found = next(one for one in self.callbacks if trigger in [f"{i['id']}.{i['property']}" for i in one["inputs"]])
        given = {key.replace("_", "-"): value for key, value in states.items()}
        parts = found["output"].strip(".").split("...")
        outputs = [dict(zip(("id", "property"), part.rsplit(".", 1), strict=True)) for part in parts]
        filled = [[{**one, "value": given.get(one["id"])} for one in found[kind]] for kind in ("inputs", "state")]
        body = {
            "output": found["output"],
            "outputs": outputs if len(parts) > 1 else outputs[0],
            "inputs": filled[0],
            "state": filled[1],
            "changedPropIds": [trigger],
        }
        request = urllib.request.Request(
            f"{self.address}_dash-update-component", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["response"] if answer.status == 200 else {}


def memory_of(pid):
    """What a process has in memory, in MiB."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
def test_an_hour_of_2000_runs_of_which_50_are_written(tmp_path):
    root = tmp_path / "runs"
    healthy, failed = ended(tmp_path / "healthy", range(40)), garbage(tmp_path / "garbage")
    for number in range(RUNS - WRITTEN):
        (root / f"net-{number:04}").mkdir(parents=True)
        os.link((failed if number % 100 == 99 else healthy) / FILE, root / f"net-{number:04}" / FILE)
    script = WRITER.format(here=str(Path(__file__).parent), root=str(root), count=WRITTEN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    command = [sys.executable, "-m", "torchhook", "dashboard", str(root), "--port", "0"]
    try:
        assert writer.stdout.readline() == "begun\n"
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        ) as server:
            try:
                seen = _watched(server.stdout.readline().strip(), server.pid)
            finally:
                server.terminate()
                said = server.communicate(timeout=30)[1]
    finally:
        writer.kill()
        writer.wait()
        shutil.rmtree(tmp_path)
    assert said == ""  # no error
    assert seen["rows"] == RUNS and seen["updated"] >= WRITTEN
    assert max(seen["files"]) <= MOST_FILES
    early, late = seen["memory"][len(seen["memory"]) // 4], seen["memory"][-1]
    assert late < early + 8, f"{early:.0f} MiB after a quarter of an hour, {late:.0f} MiB in the end"


def _watched(address, pid):
    """An hour of looking at the list and, in turn, at every run."""
    client, updated = Client(address), set()
    seen = {"files": [], "memory": [], "rows": 0}
    shown = {"edition": -1, "version": 0}
    for number in range(1000 * HOUR // runs._LATER):
        answer = client.fire("runs-tick.n_intervals", runs_shown=shown)
        grid = answer.get("runs-grid", {})
        seen["rows"] = len(grid["rowData"]) if "rowData" in grid else seen["rows"]
        updated |= {row["name"] for row in grid.get("rowTransaction", {}).get("update", ())}
        shown = answer.get("runs-shown", {}).get("data", shown)
        if number % 8 == 0:  # every written run is opened, and so are others
            run = f"written-{number // 16 % WRITTEN:02}" if number % 16 else f"net-{number:04}"
            client.fire("url.pathname", url=f"/run/{run}/layers")
            seen["files"].append(files_of(pid))
            seen["memory"].append(memory_of(pid))
    return {**seen, "updated": len(updated)}
