"""The saved call and its replay: the same numbers in another process, without executing anything from the file."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import saved_calls
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sick_models import Calls, Divide, Log, Sqrt, line_of, linear
from torch import nn

from torchhook.core.errors import NonfiniteError
from torchhook.origins import Catch, replay
from torchhook.rules.origin.catch import catch_nonfinite

KEY = "torchhook.call"


def saved(model, run, where):
    with Catch(model, Path(where), "record") as catch:
        run()
    return catch


def told(file):
    with safe_open(file, "pt") as opened:
        return json.loads(opened.metadata()[KEY])


def rewritten(file, change):
    """The file with its metadata changed."""
    data = told(file)
    change(data)
    save_file(load_file(file), file, {KEY: json.dumps(data)})
    return file


@pytest.fixture
def sick(tmp_path):
    torch.manual_seed(3)
    model = saved_calls.Model()
    catch = saved(model, lambda: model(torch.randn(6, 4)), tmp_path / "new" / "folder")
    return model, catch


def test_the_error_says_where_the_file_is_and_a_replay_shows_the_same(tmp_path):
    model = nn.Sequential(linear(), Log(), linear())
    with pytest.raises(NonfiniteError) as error:
        with catch_nonfinite(model, save=tmp_path) as catch:
            model(torch.zeros(2, 4))
    assert catch.file == tmp_path / "nonfinite_1_forward_0.safetensors"
    assert str(catch.file) in str(error.value) and catch.finding.evidence["saved"] == str(catch.file)
    assert replay(catch.file, model) == catch.origin
    assert replay(str(catch.file), model[1]) == catch.origin  # the module itself


def test_a_file_can_be_named(tmp_path):
    model = nn.Sequential(linear(), Divide())
    catch = saved(model, lambda: model(torch.ones(1, 4)), tmp_path / "mine.safetensors")
    assert catch.file == tmp_path / "mine.safetensors" and catch.file.exists()


def test_all_kinds_of_arguments_and_state_come_back(sick):
    model, catch = sick
    assert catch.origin.path == "sick" and not catch.finding.evidence.get("not_stored")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(7)  # the values of the file count
    model.eval()
    saved_calls.LATEST.clear(), saved_calls.BUILT.clear()
    torch.manual_seed(99)
    assert replay(catch.file, model) == catch.origin
    assert catch.origin.line == line_of(saved_calls.Sick, "sick")
    assert not saved_calls.BUILT  # no constructor ran
    assert model.sick.fc.weight[0, 0] == 7 and not model.training and not model.sick.norm.training


def test_in_a_fresh_process_the_numbers_are_bit_equal(tmp_path):
    torch.manual_seed(3)
    model = saved_calls.Model()
    saved_calls.LATEST.clear()
    catch = saved(model, lambda: model(torch.randn(6, 4)), tmp_path)
    code = f"""
import sys, torch, saved_calls
from torchhook.origins import replay
origin = replay({str(catch.file)!r}, saved_calls.Model())
torch.save(saved_calls.LATEST[-1], {str(tmp_path / "latest.pt")!r})
print(origin.message())
"""
    folder = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == catch.origin.message()
    assert torch.equal(torch.load(tmp_path / "latest.pt"), saved_calls.LATEST[0])


def test_a_backward_comes_back_with_its_gradients(tmp_path):
    model = nn.Sequential(linear(), Sqrt(), linear())
    catch = saved(
        model, lambda: model(torch.zeros(2, 4)).square().sum().add(model[0].weight.sum()).backward(), tmp_path
    )
    assert catch.origin.phase == "backward" and catch.file.name == "nonfinite_1_backward_0.safetensors"
    assert replay(catch.file, model) == catch.origin


def test_what_was_broken_before_comes_back_too(tmp_path):
    model = nn.Sequential(linear(), linear())
    catch = saved(model, lambda: model(torch.full((1, 4), torch.nan)), tmp_path / "data")
    assert catch.origin.came_with and replay(catch.file, model) == catch.origin
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    catch = saved(model, lambda: model(torch.ones(1, 4)), tmp_path / "state")
    assert catch.origin.phase == "state" and replay(catch.file, nn.Sequential(linear(), linear())) == catch.origin


def test_a_norm_that_is_used_twice(tmp_path):
    norm = nn.BatchNorm1d(4)
    inner = Calls(lambda self, x: self.b(self.a(x)) / 0, a=norm, b=norm)
    model = nn.Sequential(linear(), inner)
    catch = saved(model, lambda: model(torch.randn(8, 4)), tmp_path)
    assert replay(catch.file, model) == catch.origin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_and_autocast(tmp_path, dtype):
    model = nn.Sequential(linear(), Calls(lambda self, x: self.fc(x) / 0, fc=linear())).to(dtype)
    catch = saved(model, lambda: model(torch.ones(2, 4, dtype=dtype)), tmp_path)
    assert replay(catch.file, model.float()) == catch.origin
    assert catch.origin.operands[0].dtype == str(dtype).removeprefix("torch.")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        catch = saved(model, lambda: model(torch.ones(2, 4)), tmp_path / "autocast")
    assert replay(catch.file, model) == catch.origin and catch.origin.operands[0].dtype == "bfloat16"


def test_tied_and_shared_and_strided_tensors(tmp_path):
    def forward(self, x, y):
        return self.b(self.a(x)) / (y - y)

    model = nn.Sequential(Calls(forward, a=linear(), b=linear()))
    model[0].b.weight = model[0].a.weight
    outer = Calls(lambda self, x: self.inner(x.t(), x[::1].t()), inner=model[0])
    catch = saved(outer, lambda: outer(torch.randn(4, 4)), tmp_path)
    assert catch.origin.path == "inner" and replay(catch.file, outer) == catch.origin


def test_what_transformers_returns_comes_back(tmp_path):
    from transformers.modeling_outputs import BaseModelOutput

    def sick(self, output):
        assert isinstance(output, BaseModelOutput) and output["last_hidden_state"] is output.last_hidden_state
        return output.last_hidden_state / 0

    model = Calls(lambda self, x: self.sick(BaseModelOutput(last_hidden_state=x)), sick=Calls(sick))
    catch = saved(model, lambda: model(torch.ones(2, 4)), tmp_path)
    assert catch.origin.path == "sick" and replay(catch.file, model) == catch.origin


def test_an_argument_that_cannot_be_stored_is_named_everywhere(tmp_path):
    class Cache:
        pass

    def sick(self, x, cache, key):
        return key(x) / 0

    model = Calls(lambda self, x: self.sick(x, cache=Cache(), key=lambda x: x), sick=Calls(sick))
    catch = saved(model, lambda: model(torch.ones(2, 4)), tmp_path)
    assert catch.origin.op == "aten.div"
    lost = catch.finding.evidence["not_stored"]
    assert len(lost) == 2 and "kwargs.cache" in lost[0] and "Cache" in lost[0] and "kwargs.key" in lost[1]
    assert "kwargs.cache" in catch.finding.message and told(catch.file)["lost"] == lost
    with pytest.raises(ValueError, match="could not store kwargs.cache .*Cache.*kwargs.key"):
        replay(catch.file, model)


def test_a_disk_that_fails_stops_nothing(tmp_path):
    (tmp_path / "file").write_text("in the way")
    model = nn.Sequential(linear(), Divide())
    catch = saved(model, lambda: model(torch.ones(1, 4)), tmp_path / "file" / "below")
    assert catch.file is None and catch.origin.path == "1" and "not saved" in catch.finding.message


def test_another_model_is_refused(tmp_path):
    model = nn.Sequential(linear(), Calls(lambda self, x: self.fc(x) / 0, fc=linear()))
    file = saved(model, lambda: model(torch.ones(2, 4)), tmp_path).file
    with pytest.raises(ValueError, match="of '1', a Calls; this Linear neither is nor contains it"):
        replay(file, linear())
    other = nn.Sequential(linear(), Calls(lambda self, x: self.fc(x) / 0, fc=linear(5)))
    with pytest.raises(ValueError, match="'fc.* is 4.* in the file, but 5.* in this model"):
        replay(file, other)


def test_what_is_no_such_file_is_refused(tmp_path, sick):
    model, catch = sick
    text = tmp_path / "text.safetensors"
    text.write_text("not at all")
    plain = tmp_path / "plain.safetensors"
    save_file({"x": torch.ones(2)}, plain)
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(catch.file.read_bytes()[:-40])
    for file in (text, plain, cut):
        with pytest.raises(ValueError, match="is not a call saved by torchhook, or it is corrupt"):
            replay(file, model)
    with pytest.raises(FileNotFoundError):
        replay(tmp_path / "nowhere.safetensors", model)
    newer = rewritten(catch.file, lambda data: data.update(format=99))
    with pytest.raises(ValueError, match="has format 99, this torchhook reads format 1"):
        replay(newer, model)


def _deep(data):
    node = {"value": 1}
    for _ in range(100_000):
        node = {"type": "builtins:tuple", "items": [[0, node]]}
    data["args"] = node


HOSTILE = {
    "a function": lambda data: data["args"].update(type="os:system", items=[[0, {"value": "touch pwned"}]]),
    "a class that is no container": lambda data: data["args"].update(type="subprocess:Popen"),
    "a lazy import": lambda data: data["args"].update(type="lazy_module:Thing"),
    "a module not imported": lambda data: data["args"].update(type="antigravity:Fly"),
    "no name": lambda data: data["args"].update(type=3),
    "no tensor": lambda data: data["args"]["items"][0][1].update(tensor="nowhere", device="cpu"),
    "no device": lambda data: data["args"]["items"][0][1].update(tensor="seed.cpu", device="!"),
    "no dtype": lambda data: data["setting"]["autocast"].append(["cpu", True, "load"]),
    "no seeds": lambda data: data["setting"].pop("seeds"),
    "no origin": lambda data: data.pop("origin"),
    "a list": lambda data: data.update(args=[]),
    "state": lambda data: data["state"].pop("fc.weight"),
    "wanted": lambda data: data.update(wanted=None),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_and_nothing_of_them_is_run(sick, change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lazy, asked = ModuleType("lazy_module"), []
    lazy.__getattr__ = asked.append
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    model, catch = sick
    file = rewritten(catch.file, change)
    with pytest.raises(ValueError):
        replay(file, model)
    assert not (tmp_path / "pwned").exists() and "antigravity" not in sys.modules
    assert "Thing" not in asked


def test_a_missing_library_is_named_before_anything_runs(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[files\]"'):
        catch_nonfinite(linear(), save=tmp_path)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[files\]"'):
        replay(tmp_path / "x.safetensors", linear())
    catch_nonfinite(linear())
