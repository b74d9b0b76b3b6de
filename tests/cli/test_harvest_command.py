"""``torchhook harvest``: a whole data set through a model, from a command line."""

import pytest
import torch

from torchhook.activations.store import Activations

NET = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
samples = TensorDataset(torch.arange(30.0).view(10, 3), torch.arange(10))
number = 3

def batches():
    return [samples.tensors[0][:6], samples.tensors[0][6:]]

def once():
    yield from batches()

def largest(output):
    return output.amax(1)

class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.same = nn.Identity()

    def forward(self, x):
        if (x == 12).any():
            raise ArithmeticError("twelve")
        return self.same(x)
"""


@pytest.fixture
def harvested(command, project, tmp_path, monkeypatch):
    """Run the command with the model above; what it said, and the folder."""
    (tmp_path / "harvesting_net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)

    def run(*arguments, model="model", data="samples", sites="0,1", out="acts"):
        given = ["--data", f"harvesting_net:{data}", "--sites", sites, "--out", out]
        return command("harvest", f"harvesting_net:{model}", *given, *arguments)

    return run


def test_a_data_set(harvested):
    import importlib

    done = harvested("--keep", "target", "--batch-size", "4")
    net = importlib.import_module("harvesting_net")
    assert done.code == 0
    assert done.err.startswith("harvesting 3 sites into acts: 10 samples to go:")
    assert "Activations of Sequential: 10 samples, 3 sites" in done.out and done.out.endswith("written: acts\n")
    acts = Activations.open("acts")
    assert acts.sites == ["0", "1", "target"] and acts["target"][:].tolist() == list(range(10))
    with torch.no_grad():
        rows = torch.cat([net.model[0](part) for part in net.samples.tensors[0].split(4)])
    assert torch.equal(acts["0"][:], rows.half())
    again = harvested("--keep", "target", "--batch-size", "4")
    assert again.code == 0 and "already complete" in again.err


def test_options_arrive(harvested):
    options = ["--dtype", "same", "--transform", "harvesting_net:largest", "--rows", "sample", "--stop"]
    options += ["--shard-bytes", "10", "--memory-bytes", "1MiB", "--device", "cpu", "--no-resume"]
    assert harvested(*options, data="once", sites="2").code == 0
    acts = Activations.open("acts")
    assert (acts["2"].shape, acts["2"].dtype) == ((10,), torch.float32)
    told = acts.manifest
    assert (told.rows, told.stop, told.transform, told.shards) == ("sample", True, "harvesting_net.largest", 2)


def test_old_names_of_sizes_warn(harvested):
    with pytest.warns(DeprecationWarning, match=r"harvest\(shard_mb=...\) is now harvest\(shard_bytes=...\)"):
        assert harvested("--shard-mb", "0.00001", "--batch-size", "5").code == 0
    assert Activations.open("acts").manifest.shards == 2


def test_samples_that_fail_are_skipped(harvested):
    with pytest.warns(UserWarning, match="skipped 1 sample; the first is 4: ArithmeticError: twelve"):
        assert harvested("--on-error", "skip", model="Picky", sites="same").code == 0
    assert Activations.open("acts").samples.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("options", "given", "said"),
    [
        ([], {"sites": "9"}, "'9'"),
        ([], {"data": "nowhere"}, "nowhere"),
        ([], {"data": "number"}, "data must be a DataLoader"),
        ([], {"data": "once"}, "cannot be read twice"),
        ([], {"model": "Picky", "sites": "same"}, "on_error='skip'"),
        ([], {"sites": ""}, "sites is empty: name at least one module of the model"),
        (["--transform", "harvesting_net:number"], {}, "which is not callable"),
        (["--batch-size", "3"], {"data": "batches"}, "batch_size=3 is for data that come as single samples"),
        (["--workers", "2"], {}, "workers= needs engine='ray'"),
        (["--dtype", "float7"], {}, "float7"),
        (["--shard-bytes", "5 apples"], {}, "'5 apples' is not a size"),
    ],
)
def test_mistakes_are_told_in_a_line(harvested, options, given, said):
    done = harvested(*options, **given)
    assert done.code == 2 and said in " ".join(done.err.replace("│", " ").split())
    assert "Traceback" not in done.err
