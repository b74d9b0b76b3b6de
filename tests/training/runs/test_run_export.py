"""A run as a Parquet or CSV file says what the run says."""

import csv
import math
import os
import subprocess
import sys

import pyarrow.parquet as parquet
import pytest
from run_samples import entry_at, written

from torchhook import Report
from torchhook.core.errors import RunError
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import Run, RunLog
from torchhook.training.runs.export import export_csv, export_parquet

NUMBERS = ["mean", "std", "min", "max", "l2", "abs_mean", "zero_fraction"]
COLUMNS = ["step", "path", "port", "module", "count", "nonfinite", *NUMBERS, "loss", "rate"]


@pytest.fixture
def run(tmp_path):
    log = written(RunLog(tmp_path / "run"), range(300), sites=("a", "b\n'<"))
    log.write(Entry(300, 0.0, entry_at(300, sites=("late",)).snapshot))
    log.write(Entry(301, 0.0, Snapshot({}), losses={301: math.nan}))
    log.end(Report(), "ended")
    with Run(tmp_path / "run") as run:
        yield run


def test_every_row_is_what_a_window_says(run, tmp_path):
    file = tmp_path / "run.parquet"
    assert export_parquet(run, file) == 300 * 4 + 2
    table = parquet.read_table(file)
    assert table.column_names == COLUMNS and parquet.ParquetFile(file).num_row_groups > 2
    rows = table.to_pylist()
    seen = {(row["step"], row["path"], row["port"]): row for row in rows}
    assert len(seen) == len(rows) and {row["module"] for row in rows} == {"Linear", ""}
    for step in (0, 1, 150, 299, 300):
        window = run.window(step)
        for path, port in window:
            row, said = seen[step, path, port], vars(window[path, port]["moments"])
            for name in ("count", "nonfinite", *NUMBERS):
                assert row[name] == pytest.approx(said[name], rel=1e-15)
    assert seen[10, "a", "output"]["loss"] == 1 / 11 and seen[10, "a", "param"]["rate"] == 0.01
    assert seen[300, "late", "output"]["loss"] is None and seen[300, "late", "output"]["rate"] is None
    assert [path.name for path in tmp_path.iterdir() if "parquet" in path.name] == ["run.parquet"]


def test_a_name_that_begins_like_a_formula_is_text_in_a_spreadsheet(tmp_path):
    names = ("=HYPERLINK(0)", "+1", "-1", "@SUM(A1)", "\t=1", "fc")
    written(RunLog(tmp_path / "run"), [0], sites=names, ports=("output",))
    with Run(tmp_path / "run") as run:
        assert export_csv(run, tmp_path / "run.csv") == len(names)
    with (tmp_path / "run.csv").open(newline="") as file:
        paths = {row["path"] for row in csv.DictReader(file)}
    assert paths == {"fc", *(f"'{name}" for name in names[:-1])}


def test_an_empty_run_is_an_empty_table(tmp_path):
    RunLog(tmp_path / "run").begin({})
    with Run(tmp_path / "run") as run:
        assert export_parquet(run, tmp_path / "run.parquet") == 0
    assert parquet.read_table(tmp_path / "run.parquet").column_names == COLUMNS


def test_what_fails_leaves_the_old_file(run, tmp_path, monkeypatch):
    (tmp_path / "run.parquet").write_text("old")
    monkeypatch.setattr(type(run), "blocks", lambda *_: (_ for _ in ()).throw(RunError("no")))
    with pytest.raises(RunError):
        export_parquet(run, tmp_path / "run.parquet")
    assert (tmp_path / "run.parquet").read_text() == "old" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("export", [export_csv, export_parquet])
def test_pipes_and_links_stay_what_they_are(run, tmp_path, export):
    def rows_of(file):
        return repr(parquet.read_table(file).to_pylist()) if export is export_parquet else file.read_text()

    export(run, plain := tmp_path / "plain")
    os.mkfifo(pipe := tmp_path / "pipe")
    with (tmp_path / "read").open("wb") as read, subprocess.Popen(["cat", pipe], stdout=read) as reader:
        try:
            export(run, pipe)
        except BaseException:
            reader.kill()
            raise
    (tmp_path / "link").symlink_to("behind")
    export(run, tmp_path / "link")
    assert pipe.is_fifo() and (tmp_path / "link").is_symlink()
    assert rows_of(tmp_path / "read") == rows_of(tmp_path / "behind") == rows_of(plain)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "plain", "pipe", "read", "link", "behind"}


def test_without_pyarrow_it_says_what_to_install(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[parquet\]"'):
        export_parquet(run, tmp_path / "run.parquet")
