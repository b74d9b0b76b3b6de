"""What `record` writes, what it leaves behind, and what becomes of it when something goes wrong."""

import copy
import json
import math
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from specimens import hooks_of
from torchhook import FileError, NotRecordedError, Recording, SelectionError, diff, record
from torchhook.compare.recordings.files import plain_values


def net(**options):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 3))


X = torch.linspace(-2, 2, 40).view(5, 8)


def test_values_are_those_that_flowed(tmp_path):
    model = net()
    seen = []
    handles = [layer.register_forward_hook(lambda _, __, y: seen.append(y.clone())) for layer in model]
    torch.manual_seed(3)
    model(X)
    for handle in handles:
        handle.remove()
    fresh = net()
    torch.manual_seed(3)
    recording = record(fresh, X, to=tmp_path / "a.th")
    for number, value in enumerate(seen):
        assert recording[str(number)].equal(value), number  # also what a ReLU in place has overwritten
    assert recording["0", "input"].equal(X) and recording[""].equal(seen[-1])
    assert recording.parameters()["0.weight"].equal(model[0].weight)
    assert set(recording.parameters()) == set(model.state_dict())
    assert recording.inputs().args[0].equal(X)
    assert (recording.model, recording.keep, recording.steps) == ("Sequential", "all", [0])
    assert recording.environment["torch"] == torch.__version__
    assert {row["port"] for row in recording.table("list")} == {"param", "input", "output"}


def test_nothing_is_left_behind(tmp_path):
    model = net()
    before = hooks_of(model), copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    record(model, (X, torch.zeros(5, 3)), to=tmp_path / "a.th", loss=F.mse_loss)
    assert hooks_of(model) == before[0] and torch.get_rng_state().equal(before[2])
    assert all(value.equal(before[1][name]) for name, value in model.state_dict().items())
    assert all(parameter.grad.equal(torch.ones_like(parameter)) for parameter in model.parameters())
    assert model.training
    with pytest.raises(RuntimeError), record(model, to=tmp_path / "b.th"):
        model(torch.zeros(5, 7))
    assert hooks_of(model) == before[0]


def test_a_block_around_any_code(tmp_path):
    model = net().eval()
    with record(model, to=tmp_path / "a.th", sites=["0", nn.ReLU]) as recorder:
        for scale in (1.0, 2.0):
            model(scale * X)
    recording = recorder.recording
    assert recording.steps == [0, 1]
    paths = {row["path"] for row in recording.table("list") if row["port"] == "output"}
    assert paths == {"", "0", "2"}
    first, second = (recording.inputs(step).args[0] for step in recording.steps)
    assert second.equal(2 * first)
    with pytest.raises(ValueError, match="used once"):
        recorder.open()
    with pytest.raises(NotRecordedError, match=r"at the output of '4'; nearest"):
        recording["4"]


def test_gradients_and_updates(tmp_path):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    gradients, weights = [], [model[0].weight.detach().clone()]
    with record(model, to=tmp_path / "a.th", grads=True, optimizer=optimizer, steps=2):
        for _ in range(4):
            optimizer.zero_grad()
            model(X).square().sum().backward()
            gradients.append(model[0].weight.grad.clone())
            optimizer.step()
            weights.append(model[0].weight.detach().clone())
    recording = Recording(tmp_path / "a.th")
    assert recording.steps == [0, 1]  # and the parameters after the last of them
    lines = [line for line in recording.ranks[0].lines if line.port == "param_grad" and line.path == "0.weight"]
    found = [recording.ranks[0]._tensor(line.tensors[0]) for line in lines]
    assert [a.equal(b) for a, b in zip(found, gradients, strict=False)] == [True, True]
    assert [recording.parameters(step)["0.weight"].equal(weights[step]) for step in range(3)] == [True] * 3


def test_one_tensor_is_written_once(tmp_path):
    model = nn.Sequential(*(nn.Identity() for _ in range(20)))
    record(model, torch.zeros(1000, 1000), to=tmp_path / "a.th", noise=False)
    assert sum(file.stat().st_size for file in (tmp_path / "a.th").iterdir()) < 1.5 * 4e6


def test_files_are_plain_safetensors_and_json(tmp_path):
    from safetensors import safe_open

    record(net(), X, to=tmp_path / "a.th")
    (file,) = (tmp_path / "a.th").glob("*.safetensors")
    with safe_open(str(file), "pt") as opened:
        shapes = {tuple(opened.get_tensor(key).shape) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    assert {(5, 8), (16, 8), (5, 3)} <= shapes
    assert json.loads((tmp_path / "a.th" / "recording.json").read_text())["version"] == 1
    lines = (tmp_path / "a.th" / "values.jsonl").read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)


def test_inputs_of_all_kinds_come_back(tmp_path):
    class Odd(nn.Module):
        def forward(self, x, *, pair, flag=True, scale=1.0, nothing=None):
            return pair[0] * scale + x if flag else x

    given = {"x": torch.ones(2), "pair": (torch.zeros(2), [1, "two"]), "scale": float("inf")}
    recording = record(Odd(), given, to=tmp_path / "a.th", noise=False)
    back = recording.inputs()
    assert back.args == () and back.kwargs["pair"][1] == [1, "two"] and isinstance(back.kwargs["pair"], tuple)
    assert back.kwargs["scale"] == float("inf")
    other = record(Odd(), {**given, "nothing": object()}, to=tmp_path / "b.th", noise=False)
    with pytest.raises(FileError, match="objects other than tensors.*pass x="):
        other.inputs()


def test_values_of_all_dtypes(tmp_path):
    class Kinds(nn.Module):
        def forward(self, x):
            kinds = (torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32, torch.bool)
            return {str(kind): x.to(kind) for kind in kinds} | {"sparse": x.to_sparse(), "nested": None}

    for keep in ("all", "sketch"):
        recording = record(Kinds(), torch.arange(6.0).view(2, 3), to=tmp_path / f"{keep}.th", keep=keep)
        values = recording[""]
        assert [value.dtype for value in values[:4]] == [torch.bfloat16, torch.float16, torch.float64, torch.complex64]
        assert values[3].real.equal(torch.arange(6.0).view(2, 3)) and values[-1].equal(torch.arange(6.0).view(2, 3))


def test_sketches_are_small_and_still_tell_where(tmp_path):
    def wide(eps):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512, eps=eps), nn.Linear(512, 512))

    x = torch.randn(4, 256, 512)
    for name, eps in (("a", 1e-5), ("same", 1e-5), ("other", 1e-3)):
        record(wide(eps), x, to=tmp_path / f"{name}.th", keep="sketch")
    size = sum(file.stat().st_size for file in (tmp_path / "a.th").iterdir() if file.suffix == ".safetensors")
    kept = size - x.nbytes  # the input of the model is kept whole
    assert kept < 10 * 8 * 2048  # a few kilobytes of each
    assert diff(tmp_path / "a.th", tmp_path / "same.th").same
    assert diff(tmp_path / "a.th", tmp_path / "other.th").module == "1"
    assert diff(wide(1e-3), tmp_path / "a.th").module == "1"  # against a model, too


def test_arguments_that_are_wrong_are_said(tmp_path):
    model = net()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("keep")
    with pytest.raises(FileError, match="exists already; choose another name"):
        record(model, X, to=tmp_path / "full")
    with pytest.raises(ValueError, match="keep must be 'all' or 'sketch'"):
        record(model, X, to=tmp_path / "a.th", keep="some")
    with pytest.raises(ValueError, match="loss= needs x"):
        record(model, to=tmp_path / "a.th", loss=F.mse_loss)
    with pytest.raises(ValueError, match="are for a with block"):
        record(model, X, to=tmp_path / "a.th", grads=True)
    with pytest.raises(SelectionError, match="nearest"):
        record(model, X, to=tmp_path / "a.th", sites="nothing")
    assert not (tmp_path / "a.th").exists()
    for path, why in ((tmp_path / "missing.th", "does not exist"), (tmp_path / "full" / "mine.txt", "is a file")):
        with pytest.raises(FileError, match=why):
            Recording(path)
    with pytest.raises(FileError, match="is not a recording"):
        Recording(tmp_path / "full")


def test_a_recording_of_nothing_says_so(tmp_path):
    with record(net(), to=tmp_path / "a.th"):
        pass
    with pytest.raises(ValueError, match="the model was not called while it was recorded"):
        diff(tmp_path / "a.th", tmp_path / "a.th")


KILLED = """
import os, sys, torch
from torch import nn
from torchhook import record
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with record(model, to=sys.argv[1], grads=True, optimizer=optimizer):
    for step in range(10_000):
        optimizer.zero_grad()
        model(torch.ones(4096, 256)).square().mean().backward()
        optimizer.step()
        print(step, flush=True)
"""


SERVED = """
import sys, torch
from torch import nn
from torchhook import record
recorder = record(nn.Linear(8, 8), to=sys.argv[1], keep="sketch").open()
for step in range(10_000):
    recorder.model(torch.ones(2, 8))
    print(step, flush=True)
"""


def test_a_server_that_is_killed_has_written_the_passes_that_ended(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path / "a.th")], stdout=subprocess.PIPE, text=True)
    while int(child.stdout.readline()) < 5:
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert Recording(tmp_path / "a.th").steps[:4] == [0, 1, 2, 3]  # far less than a file full of values
    assert diff(tmp_path / "a.th", tmp_path / "a.th").same


@pytest.mark.parametrize("steps", [1, 3])
def test_a_run_that_is_killed_leaves_a_recording_that_opens(tmp_path, steps):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "a.th")], stdout=subprocess.PIPE, text=True)
    while int(child.stdout.readline()) < steps:
        pass
    time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    recording = Recording(tmp_path / "a.th")
    assert recording.steps[: steps - 1] == list(range(steps - 1)) and recording["0"].shape == (4096, 256)
    for line in recording.ranks[0].lines:
        for stored in line.tensors:
            assert tuple(recording.ranks[0]._tensor(stored).shape) == stored.shape


def test_a_full_disk_stops_the_recording_and_not_the_program(tmp_path):
    script = f"""
import resource, signal, torch
from torch import nn
from torchhook import record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = nn.Linear(512, 512)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
with record(model, to={str(tmp_path / "a.th")!r}):
    for step in range(60):
        model(torch.ones(2048, 512))
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "went on\n" and done.returncode == 0, done.stderr
    assert "recording to" in done.stderr and "stopped at step" in done.stderr and "File too large" in done.stderr


def test_a_compiled_model_is_recorded(tmp_path):
    model = net().eval()
    record(model, X, to=tmp_path / "a.th")
    compiled = torch.compile(net().eval(), backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record(compiled, X, to=tmp_path / "b.th", noise=False)
    assert diff(tmp_path / "a.th", tmp_path / "b.th").same
    torch.compiler.reset()


def test_inference_mode_and_keywords(tmp_path):
    model = net().eval()
    with torch.inference_mode(), record(model, to=tmp_path / "a.th"):
        model(input=X)
    recording = Recording(tmp_path / "a.th")
    assert recording.inputs().kwargs["input"].equal(X)
    assert diff(model, recording).same


def test_callers_name_arguments_in_any_order(tmp_path):
    """The model's own arguments, and those of the modules that it calls."""

    class Product(nn.Module):
        def forward(self, x, y):
            return x @ y.T

    class Score(nn.Module):
        def __init__(self, turned):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.product, self.turned = nn.Linear(8, 8), nn.Linear(8, 8), Product(), turned

        def forward(self, x, y, mask=None):
            named = {"x": self.q(x), "y": self.k(y)}
            return self.product(**(dict(reversed(named.items())) if self.turned else named))

    record(Score(False), {"x": X, "y": X + 1}, to=tmp_path / "a.th")
    record(Score(True), {"y": X + 1, "x": X}, to=tmp_path / "b.th")
    record(Score(False), {"x": X, "y": X + 1, "mask": torch.ones(5, 8)}, to=tmp_path / "c.th")
    record(Score(False), {"x": X + 1, "y": X}, to=tmp_path / "d.th")
    assert diff(tmp_path / "a.th", tmp_path / "b.th").same and diff(Score(True), tmp_path / "a.th").same
    assert diff(tmp_path / "a.th", tmp_path / "c.th").same
    assert diff(tmp_path / "a.th", tmp_path / "d.th").verdict.startswith("the inputs differ")


def test_a_gradient_that_is_off_is_laid_to_what_comes_after_the_module_in_all_combinations(tmp_path):
    class Halved(nn.ReLU):
        def forward(self, x):
            y = super().forward(x)
            return (y + y.detach()) / 2

    def loss(output):
        return output.square().mean()

    models = [
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), relu, nn.Tanh())) for relu in (nn.ReLU(), Halved())
    ]
    models[1].load_state_dict(models[0].state_dict())
    files = [tmp_path / "a.th", tmp_path / "b.th"]
    for model, file in zip(models, files, strict=True):
        record(model, X, to=file, loss=loss)
    for found in (diff(*models, X, loss), diff(files[0], models[1], loss=loss), diff(*files)):
        assert (found.first, found.module) == (("1.0", "grad_output"), "1"), found.verdict


@pytest.mark.parametrize("keep", ["all", "sketch"])
def test_gradients_that_only_one_side_has_are_a_note(tmp_path, keep):
    record(net(), X, to=tmp_path / "a.th", keep=keep, loss=lambda output: output.square().mean())
    record(net(), X, to=tmp_path / "b.th", keep=keep)
    found = diff(tmp_path / "a.th", tmp_path / "b.th")
    assert found.same and found.notes == ("only a has gradients, so none were compared",)
    assert diff(tmp_path / "b.th", tmp_path / "b.th").notes == ()


def test_noise_makes_small_mistakes_visible(tmp_path):
    """A difference of large numbers moves far with rounding; that is known only if it was measured."""

    class Cancels(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
            nn.init.constant_(self.up.bias, 1000.0)

        def forward(self, x):
            return self.down(self.up(x) - 1000)

    x = torch.randn(16, 64)
    record(Cancels(), x, to=tmp_path / "a.th")
    record(Cancels().double(), x, to=tmp_path / "b.th")
    assert diff(tmp_path / "a.th", tmp_path / "b.th").same
    noise = json.loads(Path(tmp_path / "a.th" / "noise.json").read_text())
    assert max(max(one["by"]) for one in noise if one["path"] == "down" and one["port"] == "input") > 1e-6


def test_recordings_on_two_threads_do_not_mix(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    def one(number):
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        x = torch.full((2, 4), float(number))
        return record(model, x, to=tmp_path / f"{number}.th")["0", "input"].equal(x)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(one, range(12)))


def test_ranks_that_only_have_stages_of_a_pipeline_are_put_together(tmp_path):
    """Two processes would write these; here one writes each after the other."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
    record(whole, X, to=tmp_path / "whole.th", noise=False)

    class Stage(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                self.add_module(name, whole[int(name)])

        def forward(self, x):
            for part in self.children():
                x = part(x)
            return x

    stages = Stage("01"), Stage("23")
    record(stages[0], X, to=tmp_path / "first.th", noise=False)
    record(stages[1], stages[0](X), to=tmp_path / "second.th", noise=False)
    ranks = [tmp_path / "first.th", tmp_path / "second.th"]
    assert diff(tmp_path / "whole.th", ranks).same
    with torch.no_grad():
        whole[2].weight[3] *= 1.5
    record(stages[1], stages[0](X), to=tmp_path / "faulty.th", noise=False)
    assert diff(tmp_path / "whole.th", [ranks[0], tmp_path / "faulty.th"]).module == "2"


@pytest.mark.parametrize("keep", ["all", "sketch"])
def test_values_in_the_verdict_belong_to_their_sides(tmp_path, keep):
    """Whichever of the two is a model that runs here, and whichever was recorded."""
    a, b = nn.Linear(8, 512, bias=False), nn.Linear(8, 512, bias=False)
    nn.init.constant_(a.weight, 1.0)
    nn.init.constant_(b.weight, 2.0)
    x = torch.ones(16, 8)
    recorded = [record(model, x, to=tmp_path / f"{number}.th", keep=keep) for number, model in enumerate((a, b))]
    for one, other in ((a, b), (a, recorded[1]), (recorded[0], b), recorded):
        found = diff(one, other, x if one is a and other is b else None)
        assert "8 in a, 16 in b" in found.verdict


def test_a_sketch_that_does_not_know_where_says_nothing_of_it(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Linear(64, 512), torch.randn(64, 64)
    record(model, x, to=tmp_path / "a.th", keep="sketch")
    with torch.no_grad():
        model.weight[5] *= 3  # none of the entries that are kept
    record(model, x, to=tmp_path / "b.th", keep="sketch")
    verdict = diff(tmp_path / "a.th", tmp_path / "b.th").verdict
    assert "relative to its size; rounding explains" in verdict and "in a," not in verdict


def test_two_recordings_with_as_many_ranks_are_compared_rank_by_rank(tmp_path):
    def recorded(name, at=None):
        torch.manual_seed(0)
        paths = []
        for number in range(2):
            model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            with torch.no_grad():
                if at == number:
                    model[2].weight *= 1.5
            paths.append(tmp_path / f"{name}{number}.th")
            record(model, X, to=paths[-1], noise=False)
        return paths

    a = recorded("a")
    assert diff(a, recorded("b")).same
    found = diff(a, recorded("c", at=1))
    assert found.module == "2" and found.verdict.startswith("rank 1: a and b diverge at 2 (Linear)")
    with pytest.raises(ValueError, match="a has 2 ranks and b 3"):
        diff(a, [*a, a[0]])


class Shifted(nn.Module):
    """Adds something to one row, or puts NaN there."""

    def __init__(self, by=0.0):
        super().__init__()
        self.by = by

    def forward(self, x):
        y = x * 2
        y[777] += self.by
        return y


def test_sketches_say_no_more_than_they_know(tmp_path):
    """One row of 8192 is in none of the random sums, but in the moments."""
    x = torch.rand(8192, 64, generator=torch.Generator().manual_seed(0))
    files = {
        by: record(nn.Sequential(Shifted(by), nn.Identity()), x, to=tmp_path / f"{by}.th", keep="sketch")
        for by in (0.0, 100.0, math.nan)
    }
    assert diff(files[0.0], files[0.0]).verdict == "a and b agree: all that the sketches keep is equal"
    for by in (100.0, math.nan):
        found = diff(files[0.0], files[by])
        assert found.module == "0", found.verdict
        assert " in a, " not in found.verdict  # none of the entries that were kept is off


def test_parts_of_sketches_have_no_values_to_show(tmp_path):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            return self.q(x).tanh() * self.k(x)

    class Fused(nn.Module):
        def __init__(self, source):
            super().__init__()
            self.qk = nn.Linear(64, 128)
            self.qk.weight = nn.Parameter(torch.cat([source.q.weight, 2 * source.k.weight]))
            self.qk.bias = nn.Parameter(torch.cat([source.q.bias, source.k.bias]))

        def forward(self, x):
            q, k = self.qk(x).chunk(2, -1)
            return q.tanh() * k

    torch.manual_seed(0)
    split, x = Split(), torch.randn(64, 64)
    models = {"a": split, "b": Fused(split)}
    files = [record(model, x, to=tmp_path / f"{name}.th", keep="sketch") for name, model in models.items()]
    found = diff(*files)
    assert found.module == "k" and "nan" not in found.verdict, found.verdict


def test_no_copy_on_write_goes_to_the_writing_thread(tmp_path, monkeypatch):
    """torch may hang if two threads let go of copies on write of one tensor at the same moment."""
    written = []

    def noted(tensor):
        written.append(torch._C._is_cow_tensor(tensor))
        return plain_values(tensor)

    monkeypatch.setattr("torchhook.compare.recordings.writer.plain_values", noted)
    record(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(3, 4), to=tmp_path / "a.th", keep="all")
    assert written and not any(written)
