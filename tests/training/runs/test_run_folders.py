"""Folders of runs: new ones, those there are, and those that go."""

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
import torch
from run_samples import written

from torchhook import Report
from torchhook.core.errors import RunError
from torchhook.stats.reading import Snapshot
from torchhook.training.logs import Entry
from torchhook.training.runs import RunLog
from torchhook.training.runs.folders import clear, delete, find, leftovers, new_folder, prunable
from torchhook.training.runs.schema import FILE


def run_in(folder, days_ago=0.0, state="ended"):
    log = written(RunLog(folder), [0])
    log.write(Entry(1, 0.0, Snapshot({}), maps={"conv": torch.rand(1, 2, 2)}))
    if state:
        log.end(Report(), state)
    db = sqlite3.connect(folder / FILE)
    db.execute("UPDATE life SET started = ?", (time.time() - 86400 * days_ago,))
    db.commit()
    db.close()
    return folder


def test_folders_have_names_of_their_own_even_if_made_at_once(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda: made.append(new_folder(tmp_path / "runs", "net"))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 12 and all(folder.is_dir() for folder in made)


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("Net", "Net-2"),
        ("../../etc/passwd", "etc-passwd-2"),
        ("<b>\n\0\ud800", "b-2"),
        ("é", "run-2"),
        ("", "run-2"),
        (".", "run-2"),
        ("x" * 500, "x" * 60 + "-2"),
    ],
)
def test_any_name_makes_a_folder_right_there(tmp_path, name, begins):
    folder = new_folder(tmp_path, name)
    assert folder.parent == tmp_path and folder.is_dir() and folder.name.startswith(begins)


def test_latest_leads_to_the_last_but_is_never_in_the_way(tmp_path):
    first, second = new_folder(tmp_path, "a"), new_folder(tmp_path, "b")
    assert (tmp_path / "latest").is_symlink() and (tmp_path / "latest").readlink().name == second.name
    assert {path.name for path in tmp_path.iterdir()} == {first.name, second.name, "latest"}
    (tmp_path / "other" / "latest").mkdir(parents=True)
    assert new_folder(tmp_path / "other", "a").is_dir() and not (tmp_path / "other" / "latest").is_symlink()


def test_where_there_are_no_links_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.symlink_to", lambda *_, **__: (_ for _ in ()).throw(OSError("no links")))
    assert new_folder(tmp_path, "net").is_dir() and len(list(tmp_path.iterdir())) == 1


def test_runs_are_found_newest_first_without_links_and_strangers(tmp_path):
    old, new = run_in(tmp_path / "z", days_ago=2), run_in(tmp_path / "a", days_ago=1)
    run_in(tmp_path / "a" / "other")
    (tmp_path / "stranger").mkdir()
    (tmp_path / "latest").symlink_to("a")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / FILE).write_text("no database")
    assert find(tmp_path) == [broken, new, old]  # of what cannot be read, when the file was written is known
    with pytest.raises(RunError, match="there is no folder '.*nowhere'"):
        find(tmp_path / "nowhere")


def test_what_to_prune(tmp_path):
    folders = {days: run_in(tmp_path / f"run{days}", days) for days in (1, 5, 10, 20)}
    run_in(tmp_path / "running", days_ago=30, state=None)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / FILE).write_text("no database")
    assert prunable(tmp_path, keep=1) == [folders[5], folders[10], folders[20]]
    assert prunable(tmp_path, keep=0, older_than=7) == prunable(tmp_path, older_than=7) == [folders[10], folders[20]]
    assert prunable(tmp_path, keep=3, older_than=7) == [folders[20]]
    assert prunable(tmp_path, keep=9) == []
    for wrong in ({}, {"keep": -1}, {"older_than": -1}):
        with pytest.raises(ValueError, match="keep"):
            prunable(tmp_path, **wrong)


def test_a_run_is_deleted_with_its_samples(tmp_path):
    folder = run_in(tmp_path / "run", state=None)
    (tmp_path / "latest").symlink_to("run")
    assert delete(folder) is True
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_of_the_run_stays(tmp_path):
    folder = run_in(tmp_path / "run")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "00000000-0.png").write_text("somebody else's")
    (folder / "model.pt").write_text("weights")
    (folder / "samples" / "notes.txt").write_text("mine")
    (folder / "checkpoints").mkdir()
    elsewhere = run_in(tmp_path / "elsewhere")
    (folder / "linked").symlink_to(elsewhere)
    assert delete(folder) is False and (elsewhere / FILE).exists()
    assert {path.name for path in folder.iterdir()} == {"model.pt", "samples", "checkpoints", "linked"}
    assert [path.name for path in (folder / "samples").iterdir()] == ["notes.txt"]
    linked = run_in(tmp_path / "linked")
    for file in (linked / "samples").iterdir():
        file.unlink()
    (linked / "samples").rmdir()
    (linked / "samples").symlink_to(tmp_path / "kept")
    delete(linked)
    assert (tmp_path / "kept" / "00000000-0.png").exists()


KILLED = """
import os, sys
from pathlib import Path
from torchhook.training.runs import RunLog
Path.replace = lambda *_: os.kill(os.getpid(), 9)  # the file is complete, and does not have its name yet
RunLog(sys.argv[1]).begin({})
"""


def killed_start(folder):
    done = subprocess.run([sys.executable, "-c", KILLED, folder], timeout=60, check=False)
    assert done.returncode == -9
    (draft,) = folder.glob(".run.sqlite.*[0-9]")
    return draft


def test_what_a_killed_start_left_is_found_and_cleared(tmp_path):
    kept = run_in(tmp_path / "kept")
    left = killed_start(tmp_path / "net")
    beside = shutil.copy(left, kept / ".run.sqlite.4194999")  # of a run that was continued
    (tmp_path / "latest").symlink_to("net")
    (tmp_path / ".latest.4194999").symlink_to("net")
    (tmp_path / "net" / f".run.sqlite.{os.getpid()}").touch()  # a process that may still be creating its run
    assert find(tmp_path) == [kept]
    assert leftovers(tmp_path) == [tmp_path / ".latest.4194999", beside, left]
    (tmp_path / "net" / f".run.sqlite.{os.getpid()}").unlink()
    for file in leftovers(tmp_path):
        clear(file)
    assert leftovers(tmp_path) == [] and list(tmp_path.iterdir()) == [kept]


def test_what_others_named_like_leftovers_stays(tmp_path, command):
    root, kept = tmp_path / "runs", run_in(tmp_path / "runs" / "kept")
    (root / "essays").mkdir()
    (root / "essays" / "unwritten").write_text("chapter one")
    (root / "folders" / "unwritten").mkdir(parents=True)
    (root / "folders" / ".run.sqlite.4194999").mkdir()
    (kept / "unwritten").mkdir()
    (root / ".run.sqlite.4194998").touch()  # ours, in the folder of the runs itself
    (tmp_path / "latest").symlink_to("a disk that is not mounted")
    (root / "latest").symlink_to("elsewhere")
    assert leftovers(root) == [root / ".run.sqlite.4194998"]
    done = command("runs", "prune", root, "--keep", "0", "--yes")
    assert done.code == 0 and done.out.count("removed") == 2, done.out
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {
        *("latest", "runs", "runs/latest", "runs/kept", "runs/kept/unwritten", "runs/essays", "runs/essays/unwritten"),
        *("runs/folders", "runs/folders/unwritten", "runs/folders/.run.sqlite.4194999"),
    }


def test_a_run_is_deleted_with_what_a_killed_start_left_in_it(tmp_path):
    folder = run_in(tmp_path / "run")
    (folder / ".run.sqlite.4194999").touch()
    (folder / ".run.sqlite.4194999-journal").touch()
    assert delete(folder) is True and not folder.exists()
