"""Whatever interrupts a harvest, and however often: once it has ended, its files are those of one that nothing did."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import mortal
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mortal import Texts, files, harvested
from safetensors.torch import load_file

from torchhook import HarvestError
from torchhook.activations import store_files, writer
from torchhook.activations.store import Activations
from torchhook.activations.store_files import Commit, Journal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of what is skipped and too large, each time
]


@contextmanager
def in_memory():
    """A folder there, if one can be: many hundred harvests would wait for the disk all the time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def require_whole(out, data):
    """Every sample once, each value where it belongs, every file as it was written and readable by anybody."""
    acts = Activations.open(out)
    assert acts.complete
    assert acts.verify(False) > 0
    everything = list(range(mortal.SIZE * data.batches))
    assert sorted([*acts.samples.tolist(), *acts.skipped]) == everything
    assert sorted(acts.skipped) == [sample for sample in everything if sample in data.unlucky]
    net, number = mortal.Net(), 0
    for batch in data:
        for place in range(mortal.SIZE):
            if number not in acts.skipped:
                ids = batch["input_ids"][place]
                rows = net.mix(net.embed(ids))[: batch["attention_mask"][place].sum()]
                torch.testing.assert_close(acts["mix"].of(number), rows.half(), rtol=1e-2, atol=1e-3)
            number += 1
    for path in out.rglob("*.safetensors"):
        assert len(load_file(path)) == 1


@pytest.mark.parametrize(("how", "batches", "least"), [("operations", mortal.BATCHES, 80), ("moments", 30, 25)])
def test_killed(how, batches, least):
    """By SIGKILL: at every single operation on the disk, in the middle of it; and at any moment."""
    with in_memory() as folder:
        require_the_same(folder, how, batches, least)


def require_the_same(folder, how, batches, least):
    done = subprocess.run(
        [sys.executable, mortal.__file__, how, folder], capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["killed"] >= least
    whole = files(folder / "whole")
    with torch.no_grad():
        require_whole(folder / "whole", Texts(batches=batches))
    runs = [out for out in folder.iterdir() if out.name != "whole"]
    assert len(runs) == told["runs"]
    for out in runs:
        assert files(out) == whole, out.name


@settings(max_examples=25, deadline=None)
@given(
    stops=st.lists(st.tuples(st.integers(0, 8), st.sampled_from([KeyboardInterrupt, OSError])), max_size=4),
    unlucky=st.sets(st.integers(0, 26)),
    shard_bytes=st.sampled_from([100, 300, 1000, 10**6]),
    commit_seconds=st.sampled_from([0.0, 0.001, 5.0]),
)
@example([(3, KeyboardInterrupt)], {6, 7, 8}, 300, 0.0)  # nothing of the first batch of a shard is kept
def test_interrupted_anywhere(stops, unlucky, shard_bytes, commit_seconds):
    options = {"shard_bytes": shard_bytes, "commit_seconds": commit_seconds}
    if len(unlucky) == 27:
        unlucky.pop()
    with in_memory() as folder:
        whole, out = folder / "whole", folder / "out"
        harvested(whole, Texts(batches=9, unlucky=unlucky), **options)
        for stop, error in stops:
            with pytest.raises((HarvestError, KeyboardInterrupt)):
                harvested(out, Texts(batches=9, unlucky=unlucky, stops=stop, error=error), **options)
                assert files(out) == files(whole)  # nothing was left to read
                raise KeyboardInterrupt
        acts = harvested(out, Texts(batches=9, unlucky=unlucky), **options)
        assert files(out) == files(whole)
        assert sorted([*acts.samples.tolist(), *acts.skipped]) == list(range(27))
        acts.verify(False)


@pytest.fixture
def begun(tmp_path):
    """A harvest that was interrupted in its third shard, the data for the rest, and the files that it must become."""
    data = Texts(batches=7, unlucky=(4,))
    harvested(tmp_path / "whole", data)
    with pytest.raises(KeyboardInterrupt):
        harvested(tmp_path / "out", Texts(batches=7, unlucky=(4,), stops=5))
    assert [len(path.read_bytes().splitlines()) for path in sorted((tmp_path / "out/journal").iterdir())] == [1, 1, 2]
    return tmp_path / "out", data, files(tmp_path / "whole")


def test_a_torn_tail_is_cut(begun):
    out, data, whole = begun
    seen = Activations.open(out).verify(False)
    for path in out.rglob("*.*"):
        if path.is_file() and path.name != store_files.MANIFEST:
            with path.open("ab") as file:
                file.write(b'{"batches":7,"samp')
    assert Activations.open(out).verify(False) == seen  # what was committed is there, whatever comes after it
    with pytest.raises(KeyboardInterrupt):
        harvested(out, Texts(batches=7, unlucky=(4,), stops=6), commit_seconds=1000)
    harvested(out, data)
    assert files(out) == whole


def test_half_a_line_of_the_first_commit_is_none(begun):
    out, data, whole = begun
    journal = store_files.journal_path(out, 2)
    journal.write_bytes(journal.read_bytes().splitlines()[0][:-9])
    assert len(Activations.open(out)) == 2 * 2 * mortal.SIZE - 1
    harvested(out, data)
    assert files(out) == whole


def test_a_torn_header_is_written_again(begun):
    out, data, whole = begun
    for path in out.rglob("00002*.safetensors"):
        with path.open("r+b") as file:
            file.write(b"\0" * 2000)
    Activations.open(out).verify(False)
    harvested(out, data)
    assert files(out) == whole


@pytest.mark.parametrize("shard", [0, 2])
@pytest.mark.parametrize(
    "lost",
    ["journal/{}.jsonl", "samples/{}.safetensors", "sites/mix/{}.safetensors", "sites/mix/{}.offsets.safetensors"],
)
def test_a_lost_file_is_made_again(begun, lost, shard):
    out, data, whole = begun
    (out / lost.format(f"{shard:05}")).unlink()
    harvested(out, data)
    assert files(out) == whole


def test_a_file_lost_after_the_end_is_made_again(begun):
    out, data, whole = begun
    harvested(out, data)
    path = store_files.values_path(out, "head", 1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(HarvestError, match=r"head/00001\.safetensors"):
        Activations.open(out).verify(False)
    harvested(out, data)
    assert files(out) == whole


def test_a_second_process_is_refused(tmp_path):
    script = "import sys, mortal; mortal.harvested(sys.argv[1], mortal.Texts(pause=0.3, batches=40), shard_bytes=10**6)"
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHONPATH": f"{Path(mortal.__file__).parent}:{os.environ['PYTHONPATH']}"}
    first = subprocess.Popen(
        [sys.executable, "-c", script, str(out)], env=environment, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not (out.exists() and store_files.shard_numbers(out)):
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(HarvestError, match=r"another process is writing .*00000\.jsonl'; wait until it ends"):
            harvested(out, Texts(batches=40), shard_bytes=1000000)
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    harvested(out, Texts(batches=40), shard_bytes=1000000)
    harvested(tmp_path / "whole", Texts(batches=40), shard_bytes=1000000)
    assert files(out) == files(tmp_path / "whole")


def test_one_that_another_overtook_writes_nothing_twice(begun, monkeypatch):
    """Between looking at what is missing and the first write to it, somebody else made it."""
    out, data, whole = begun
    first = writer.ShardWriter.__init__
    overtaken = []

    def late(self, *args):
        if not overtaken:
            overtaken.append(threading.get_ident())
            harvested(out, data)
        first(self, *args)

    monkeypatch.setattr(writer.ShardWriter, "__init__", late)
    with pytest.raises(HarvestError, match="batch 5 does not follow the 2 batches of shard 2: another process wrote"):
        harvested(out, data)
    monkeypatch.undo()
    assert files(out) == whole


def test_a_line_that_the_disk_takes_in_parts_is_whole(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:7]))
    journal = Journal(tmp_path / "0.jsonl")
    for batches in (1, 2):
        journal.write(Commit(batches))
    journal.close()
    monkeypatch.undo()
    assert (tmp_path / "0.jsonl").read_text() == Commit(1).line() + Commit(2).line()
