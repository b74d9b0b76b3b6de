"""Ray shares the shards of a harvest out: the same files, whoever dies on the way."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from mortal import files
from torch import nn

from torchhook import HarvestError, harvest
from torchhook.activations import store_files
from torchhook.activations.store import Activations
from torchhook.activations.store_files import last_commit

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(240)]

HERE = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
JOB = {"log_to_driver": False, "runtime_env": {"env_vars": {"PYTHONPATH": HERE}}}  # where actors find this file
DRIVER = """
import sys
import ray
from test_harvest_on_ray import JOB, run

ray.init(address=sys.argv[2], **JOB)
run(sys.argv[1], pause=0.1)
"""


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs, no more."""
    found = ray.init(num_cpus=2, include_dashboard=False, **JOB)
    yield found.address_info["address"]
    ray.shutdown()


class Numbers(nn.Module):
    """Twice the numbers, after a while, with a note of who did it."""

    def __init__(self, pause, notes):
        super().__init__()
        self.twice = nn.Linear(1, 2, bias=False)
        nn.init.constant_(self.twice.weight, 2)
        self.pause, self.notes = pause, notes

    def forward(self, x):
        if self.notes:
            (Path(self.notes) / str(os.getpid())).touch()
        time.sleep(self.pause)
        if (x < 0).any():
            raise ArithmeticError("a number below 0")
        return self.twice(x)


def run(out, data=None, pause=0.0, notes=None, **options):
    """Batches of 4 numbers, three of them a shard; 66 of them unless given."""
    given = {"engine": "ray", "workers": 2, "batch_size": 4, "shard_bytes": 100, "commit_seconds": 0.0, **options}
    data = torch.arange(66.0)[:, None] if data is None else data
    return harvest(Numbers(pause, notes), data, "twice", out, dtype=None, progress=False, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the local engine makes of it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(out, engine="local", workers=None)
    return files(out)


def rows_in(found):
    """The files less the manifest and the journals, which tell of what kind the data are."""
    return {name: content for name, content in found.items() if name.endswith(".safetensors")}


def test_two_workers_make_the_same_files_as_none(tmp_path, whole):
    notes = tmp_path / "notes"
    notes.mkdir()
    acts = run(tmp_path / "out", notes=notes, pause=0.02)
    assert files(tmp_path / "out") == whole
    assert len(list(notes.iterdir())) == 3  # one for each, and one for the first batch, here
    assert acts.complete and acts.manifest.shards == 6 and acts.samples.tolist() == list(range(66))
    acts.verify(False)


def test_actors_that_are_killed_lose_nothing(tmp_path, whole):
    notes, out, killed = tmp_path / "notes", tmp_path / "out", []
    notes.mkdir()
    ended = threading.Event()

    def kill():
        while not ended.wait(0.3) and len(killed) < 3:
            alive = [int(path.name) for path in notes.iterdir() if int(path.name) not in (os.getpid(), *killed)]
            if alive:
                killed.append(alive[0])
                os.kill(alive[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        acts = run(out, notes=notes, pause=0.15)
    finally:
        ended.set()
        killer.join()
    assert len(killed) >= 2
    assert files(out) == whole
    acts.verify(False)


def test_a_driver_that_is_killed_loses_nothing_that_was_committed(tmp_path, whole, cluster):
    out = tmp_path / "out"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, out, cluster],
        env={**os.environ, "PYTHONPATH": HERE},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 100
    while not (out / "journal").exists() or not any(
        last_commit(store_files.journal_path(out, n)) for n in store_files.shard_numbers(out)
    ):
        assert driver.poll() is None, driver.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.kill()
    driver.wait()
    assert 0 < len(Activations.open(out)) < 66
    acts = resumed(out)
    assert files(out) == whole
    acts.verify(False)


def resumed(out):
    """Once the actors of the killed driver are gone, which Ray sees to."""
    deadline = time.monotonic() + 60
    while (acts := attempted(out)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return acts


def attempted(out):
    try:
        return run(out)
    except HarvestError as error:
        assert "another process" in str(error)
        return None


def test_what_an_actor_raises_is_raised_here(tmp_path):
    x = torch.arange(66.0)[:, None]
    x[41] = -1
    said = "the model raised ArithmeticError on batch 10, samples 40 to 43: a number below 0"
    with pytest.raises(HarvestError, match=said):  # as the local engine says it
        run(tmp_path / "raised", x)
    with pytest.warns(UserWarning, match="skipped 1 sample; the first is 41: ArithmeticError"):
        acts = run(tmp_path / "skipped", x, on_error="skip")
    assert acts.samples.tolist() == [n for n in range(66) if n != 41]


def test_a_ray_data_set_is_read_without_starving(tmp_path, whole):
    """Files of parquet, read on the same two CPUs that the actors want."""
    import pyarrow.parquet
    import ray.data

    for part in range(3):
        numbers = [[float(n)] for n in range(22 * part, 22 * (part + 1))]
        pyarrow.parquet.write_table(pyarrow.table({"x": numbers, "name": ["-"] * 22}), tmp_path / f"{part}.parquet")
    data = ray.data.read_parquet([str(tmp_path / f"{part}.parquet") for part in range(3)])
    run(tmp_path / "out", data)
    assert rows_in(files(tmp_path / "out")) == rows_in(whole)


def test_a_stream_is_gone_on_with(tmp_path, whole):
    class Stream:
        def __iter__(self):
            for batch in torch.arange(66.0)[:, None].split(4):
                if stops and batch.max() > 40:
                    raise KeyboardInterrupt
                yield batch

    stops = [True]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", Stream(), batch_size=None)
    stops.clear()
    run(tmp_path / "out", Stream(), batch_size=None)
    assert rows_in(files(tmp_path / "out")) == rows_in(whole)


def test_a_module_as_a_site_means_the_same_over_there(tmp_path, whole):
    model = Numbers(0, None)
    x = torch.arange(66.0)[:, None]
    options = {"batch_size": 4, "shard_bytes": 100, "commit_seconds": 0.0, "dtype": None, "progress": False}
    harvest(model, x, [model.twice], tmp_path, engine="ray", workers=1, **options)
    assert files(tmp_path) == whole
