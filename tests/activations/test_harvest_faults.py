"""What can go wrong with a harvest, and what is there afterwards."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import mortal
import pytest
import torch
from mortal import Texts, files, harvested
from torch import nn
from torch.utils.data import DataLoader, Dataset

from specimens import hooks_of
from torchhook import BudgetError, HarvestError, SelectionError, SilentError, harvest
from torchhook.activations import store_files, worker, writer
from torchhook.activations.fingerprints import batch_fingerprint
from torchhook.activations.store import Activations

pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Doubles numbers, and raises on a negative one."""

    def __init__(self):
        super().__init__()
        self.twice, self.unused = nn.Linear(1, 2, bias=False), nn.ReLU()
        nn.init.constant_(self.twice.weight, 2)

    def forward(self, x):
        if (x < 0).any():
            raise ArithmeticError("a number below 0")
        return self.twice(x)


class Numbers(Dataset):
    """Themselves, some of which cannot be read."""

    def __init__(self, length, unreadable=(), negative=()):
        self.length, self.unreadable, self.negative = length, unreadable, negative

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.unreadable:
            raise OSError(f"picture {index} is torn")
        return torch.tensor([-1.0 if index in self.negative else float(index)])


def run(out, data=None, sites="twice", model=None, **options):
    given = {"batch_size": 4, "shard_bytes": 30, "commit_seconds": 0.0, "dtype": None, "progress": False, **options}
    return harvest(model or Net(), Numbers(21) if data is None else data, sites, out, **given)


def numbers_in(acts):
    """The samples there are, of which the rows are right."""
    assert torch.equal(acts["twice"][:], 2.0 * acts.samples[:, None].expand(-1, 2))
    acts.verify(False)
    return acts.samples.tolist()


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "torchhook-harvest"]


FULL = """
import resource, subprocess, sys
from pathlib import Path
import mortal, torch, warnings
from torchhook import HarvestError

warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder, kind = Path(sys.argv[1]), sys.argv[2]
whole, out, data = folder / "whole", folder / "small" / "out", mortal.Texts(batches=400)
options = dict(shard_bytes=1000000, commit_seconds=0.02)
mortal.harvested(whole, data, **options)
if kind == "disk":
    small = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(out.parent)]
    grown = ["mount", "-o", "remount,size=20m", str(out.parent)]
    subprocess.run(small, check=True)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))
try:
    mortal.harvested(out, data, **options)
except (HarvestError, OSError) as error:
    print(type(error).__name__, error)
there = len(mortal.Activations.open(out))
mortal.Activations.open(out).verify(False)
print(0 < there < 1000)
if kind == "disk":
    subprocess.run(grown, check=True)
else:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
mortal.harvested(out, data, **options)
print(mortal.files(out) == mortal.files(whole))
"""


@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_a_full_disk(tmp_path, kind):
    """A real one of 48 KiB, where one may mount it, and files that must not grow, where one may not."""
    alone = ["unshare", "-rm"] if kind == "disk" else []
    if alone and subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("nobody but root may mount a disk here")
    (tmp_path / "small").mkdir()
    paths = os.pathsep.join([str(Path(mortal.__file__).parent), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [*alone, sys.executable, "-c", FULL, tmp_path, kind],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    said, *checks = done.stdout.splitlines()
    assert checks == ["True", "True"]
    if kind == "disk":
        assert (
            said.startswith("HarvestError the disk of") and "is full; committed rows are safe: free some space" in said
        )
    else:
        assert said == f"OSError [Errno {errno.EFBIG}] {os.strerror(errno.EFBIG)}"


def test_what_the_disk_cannot_hold_is_refused_before_it_starts(tmp_path):
    with pytest.raises(
        HarvestError,
        match=r"not enough disk space for .*: about .* to write, judging by the first batch, but .* free"
        r" on disk, 64.0 MiB of them in reserve;",
    ):
        run(tmp_path / "out", Numbers(10**15))
    assert len(run(tmp_path / "out", Numbers(10))) == 10  # and nothing was left in the way


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read(tmp_path, workers):
    data = DataLoader(Numbers(21, unreadable=(6, 20)), 4, num_workers=workers)
    with pytest.raises(
        HarvestError, match=r"(?s)cannot read sample 6 of data: OSError: picture 6 is torn; pass on_err"
    ):
        run(tmp_path / "a", data, batch_size=None)
    with pytest.warns(UserWarning, match="skipped 2 samples; the first is 6: OSError: picture 6 is torn"):
        acts = run(tmp_path / "b", data, batch_size=None, on_error="skip")
    assert numbers_in(acts) == [n for n in range(20) if n != 6] and list(acts.skipped) == [6, 20]


def test_a_sample_that_the_model_raises_on(tmp_path):
    data = Numbers(21, negative=(0, 9, 12, 13, 14, 15))
    with pytest.raises(
        HarvestError, match=r"ArithmeticError on batch 0, samples 0 to 3: a number below 0; batches before it are safe"
    ):
        run(tmp_path / "a", data)
    later = Numbers(21, negative=(9,))
    with pytest.raises(HarvestError, match="on batch 2, samples 8 to 11") as raised:
        run(tmp_path / "b", later)
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert numbers_in(Activations.open(tmp_path / "b")) == list(range(8))  # what was before is safe
    model = Net()
    before = hooks_of(model)
    with pytest.warns(UserWarning, match="skipped 6 samples; the first is 0: ArithmeticError"):
        acts = run(tmp_path / "c", data, model=model, on_error="skip")
    assert hooks_of(model) == before
    assert list(acts.skipped) == [0, 9, 12, 13, 14, 15]
    assert numbers_in(acts) == [n for n in range(21) if n not in acts.skipped]


def test_nothing_can_be_harvested(tmp_path):
    with pytest.raises(HarvestError, match="every sample of data fails; sample 0: ArithmeticError"):
        run(tmp_path / "out", Numbers(8, negative=range(8)), on_error="skip")
    with pytest.raises(HarvestError, match="data has no samples"):
        run(tmp_path / "out", [], batch_size=None)
    assert not (tmp_path / "out").exists()


def test_a_batch_with_nan_is_kept_and_told(tmp_path):
    x = torch.arange(12.0)[:, None]
    x[5] = torch.nan
    with pytest.warns(UserWarning, match="the output of 'twice' has 2 NaN or infinite values; they were stored"):
        acts = run(tmp_path, x)
    assert acts["twice"][:].isnan().all(1).nonzero().flatten().tolist() == [5]
    assert acts["twice"].statistics.mean == pytest.approx((66 - 5) * 2 / 11)


def weights(model):
    model.twice.weight.data[1, 0] += 1e-6
    return model


def pooled(x):
    return x


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": weights(Net())}, "the weights or the structure of the model"),
        ({"model": nn.Sequential(nn.Linear(1, 2)), "sites": "0"}, "the model, the weights"),
        ({"data": Numbers(22)}, "the data, the number of samples"),
        ({"data": Numbers(21, negative=(20,))}, "the data"),
        ({"batch_size": 5}, "batch_size"),
        ({"dtype": "float16"}, "dtype, the sites or the shapes of their outputs"),
        ({"sites": ["twice", ""]}, "the sites or the shapes of their outputs"),
        ({"transform": pooled}, "transform"),
        ({"rows": "sample"}, "rows"),
        ({"stop": True}, "stop"),
        ({"on_error": "skip"}, "on_error"),
    ],
)
def test_something_else_is_refused_on_going_on(tmp_path, changed, said):
    def interrupt(_, args):
        if args[0].max() > 7:
            raise KeyboardInterrupt

    model = Net()
    handle = model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model=model)
    handle.remove()
    before = files(tmp_path)
    with pytest.raises(
        HarvestError, match=f"cannot resume .*: .*{said}.* changed since it was started; pass what it was"
    ):
        run(tmp_path, **changed)
    assert files(tmp_path) == before
    assert numbers_in(run(tmp_path, model=model)) == list(range(21))


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("commit_seconds", [0.0, 1000.0])
def test_data_that_changed_in_the_middle_are_noticed_where_it_goes_on(tmp_path, commit_seconds):
    with pytest.raises(KeyboardInterrupt):
        harvested(tmp_path, Texts(batches=8, unlucky=(), stops=6), shard_bytes=1000000, commit_seconds=commit_seconds)
    with pytest.raises(HarvestError, match="the data changed: batch 5 differs from when it was harvested"):
        harvested(tmp_path, Texts(batches=8, unlucky=(16,)), shard_bytes=1000000)
    assert len(harvested(tmp_path, Texts(batches=8, unlucky=()), shard_bytes=1000000)) == 24


def test_only_batches_that_end_a_commit_are_fingerprinted_while_they_are_harvested(tmp_path, monkeypatch):
    found = []

    def counted(data):
        found.append(int(data[0]))
        return batch_fingerprint(data)

    monkeypatch.setattr(worker, "batch_fingerprint", counted)
    data = torch.arange(40.0).view(-1, 1)
    run(tmp_path / "shards", data, batch_size=4, shard_bytes=3 * 4 * 2 * 4, commit_seconds=1000)
    assert found == [8, 20, 32, 36], "the last batches of four shards, whose checksums a resumed harvest would compare"
    found.clear()
    run(tmp_path / "often", data, batch_size=4, shard_bytes=1000, commit_seconds=0)
    assert found == [*range(0, 40, 4), 36], "each batch, and the last one again at the end"


def test_data_that_can_be_read_once(tmp_path):
    batches = [torch.full((3, 1), float(n)) for n in range(4)]
    with pytest.raises(
        HarvestError, match=r"cannot be read twice, but resume=True may need that: an iterator can be read only once"
    ):
        run(tmp_path / "a", iter(batches), batch_size=None)
    acts = run(tmp_path / "a", (batch for batch in batches), batch_size=None, resume=False)
    assert torch.equal(acts["twice"][:], 2 * torch.cat(batches).expand(-1, 2))
    shuffled = DataLoader(Numbers(21), 4, shuffle=True)
    with pytest.raises(HarvestError, match="its order is different each time; pass shuffle=False"):
        run(tmp_path / "b", shuffled, batch_size=None)
    assert sorted(numbers_in(run(tmp_path / "b", shuffled, batch_size=None, resume=False))) == list(range(21))


def test_a_folder_that_is_not_ours(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(HarvestError, match="has other files in it; pass a new or empty folder as out"):
        run(tmp_path)
    with pytest.raises(HarvestError, match="out must be a folder, but .* is a file"):
        run(tmp_path / "notes.txt")
    assert files(tmp_path) == {"notes.txt": b"mine"}
    run(tmp_path / "out")
    with pytest.raises(HarvestError, match="already has activations; pass another folder as out"):
        run(tmp_path / "out", resume=False)
    (tmp_path / "out" / store_files.MANIFEST).write_text('{"format": 1}')
    with pytest.raises(HarvestError, match="is not a torchhook manifest"):
        run(tmp_path / "out")


def test_a_batch_beyond_the_budget(tmp_path):
    with pytest.raises(BudgetError, match=r"batch 0 has .* more than memory_bytes allows .*; use smaller batches"):
        run(tmp_path / "a", torch.ones(1000, 1), batch_size=1000, memory_bytes=1000)
    assert not (tmp_path / "a").exists()
    batches = [torch.ones(3, 1), torch.ones(3, 1), torch.ones(1000, 1)]
    with pytest.raises(BudgetError, match="batch 2 has .* more than memory_bytes allows"):
        run(tmp_path / "b", batches, batch_size=None, memory_bytes=1000)
    assert len(Activations.open(tmp_path / "b")) == 6 and not threads()
    assert len(run(tmp_path / "b", batches, batch_size=None)) == 1006


def test_no_more_than_the_budget_is_on_its_way(tmp_path, monkeypatch):
    """However slow the disk: whoever runs the model waits for it."""
    most, waiting, released = [], [], writer.WriterThread._release
    put = writer.WriterThread.put

    def slow(self, harvested):
        most.append(self._bytes)
        waiting.append(len(self._queue))
        threading.Event().wait(0.002)
        released(self, harvested)

    def watched(self, *given):
        put(self, *given)
        most.append(self._bytes)

    monkeypatch.setattr(writer.WriterThread, "_release", slow)
    monkeypatch.setattr(writer.WriterThread, "put", watched)
    run(tmp_path, torch.ones(4 * 40, 1), memory_bytes=200)  # six batches of 32 bytes
    assert max(most) == 160 and max(waiting) > 1, "with room for the one that is being made"


def test_an_interrupt_in_the_model(tmp_path):
    class Impatient(Net):
        def forward(self, x):
            if 11 in x and not done:
                raise KeyboardInterrupt
            return super().forward(x)

    done: list = []
    model = Impatient()
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model=model, commit_seconds=1000)
    acts = Activations.open(tmp_path)
    assert numbers_in(acts) == list(range(8)) and not acts.complete and not threads()
    done.append(True)
    assert numbers_in(run(tmp_path, model=model)) == list(range(21))


def test_an_error_of_the_thread_that_writes_is_raised_and_no_thread_is_left(tmp_path):
    class Saboteur(Net):
        def forward(self, x):
            if 9 in x and not done:
                store_files.samples_path(tmp_path, 2).mkdir(parents=True)  # where a file is to be
            return super().forward(x)

    done: list = []
    with pytest.raises(IsADirectoryError, match=r"samples/00002\.safetensors"):
        run(tmp_path, model=Saboteur())
    assert not threads()
    store_files.samples_path(tmp_path, 2).rmdir()
    done.append(True)
    assert numbers_in(run(tmp_path, model=Saboteur())) == list(range(21))


def test_rows_that_differ_between_batches(tmp_path):
    model, batches = nn.Conv2d(1, 2, 1), [torch.ones(2, 1, 4, 4), torch.ones(2, 1, 5, 4)]
    with pytest.raises(HarvestError, match=r"'' returned one 2×5×4 row .*, but one 2×4×4 row .* in the first batch;"):
        harvest(model, batches, "", tmp_path, commit_seconds=0, progress=False)
    assert len(Activations.open(tmp_path)) == 2 and not threads()


class Sometimes(nn.Module):
    """Calls a layer once, or twice for large numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Identity()

    def forward(self, x):
        x = self.layer(x)
        return self.layer(x) if x.max() > 4 else x


def test_sites(tmp_path):
    with pytest.raises(SelectionError, match="'twise'.*twice"):
        run(tmp_path / "out", sites="twise")
    with pytest.raises(SilentError, match="unused"):
        run(tmp_path / "out", sites=["twice", "unused"])
    with pytest.raises(SelectionError, match="sites is empty: name at least one module of the model"):
        run(tmp_path / "out", sites=[])
    assert not (tmp_path / "out").exists()
    with pytest.raises(HarvestError, match="the calls of some sites differ from the first batch: 'layer@1'"):
        run(tmp_path / "b", torch.arange(8.0)[:, None], "layer", Sometimes())


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda x: x.sum(), "not one row per sample; pass a transform= that returns rows"),
        (lambda x: x[:2], "the output of 'twice' is 2×2 for a batch of 4, not one row per sample"),
        (lambda x: list(x[:2]), "returned a list of 2 tensors for a batch of 4"),
        (lambda x: "text", "returned a str, not a tensor"),
        (lambda x: x.to(torch.complex64), "'twice' returned complex numbers, which cannot be stored; pass transform="),
        (lambda x: [y.to(torch.complex64) for y in x], "'twice' returned complex numbers"),
        (lambda x: x.to(torch.uint16), "cannot store torch.uint16; pass a transform= that converts to"),
    ],
)
def test_what_cannot_be_rows(tmp_path, transform, said):
    with pytest.raises(HarvestError, match=said):
        run(tmp_path / "out", transform=transform)
    assert not threads()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "dtype must be one of 'float16', .* not 'int8'"),
        ({"rows": "word"}, "rows must be one of"),
        ({"engine": "spark"}, "engine must be one of"),
        ({"on_error": "ignore"}, "on_error must be one of"),
        ({"shard_bytes": 0}, "shard_bytes must be at least 1"),
        ({"memory_bytes": -5}, "memory_bytes must be at least 1, not -5"),
        ({"commit_seconds": -1}, "commit_seconds must be a number of seconds"),
        ({"workers": 2}, "workers= needs engine='ray'"),
        ({"keep": ["labels"]}, "keep: the batch has no 'labels'"),
    ],
)
def test_options(tmp_path, options, said):
    with pytest.raises(ValueError, match=said):
        run(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
