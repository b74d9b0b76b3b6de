"""What a harvest keeps is what flowed, of real models, and nothing of them is changed by it."""

import filecmp
import io
import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from specimens import Containers, InPlace, OutOfPlace, Shared, hooks_of, resnet18
from torchhook import harvest
from torchhook.activations.store import Activations
from torchhook.stats import Moments

pytestmark = pytest.mark.usefixtures("one_thread")


def shipped(package: str, path: str) -> Path:
    return Path(find_spec(package).origin).parent / path


def outputs(model, path, batches):
    """What flowed there, by a plain loop with a plain hook."""
    found = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: found.append(first(output)))
    with torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    handle.remove()
    return found


def first(output):
    return (output if isinstance(output, torch.Tensor) else output[0]).clone()


def equal(a, b):
    return torch.equal(a, b) and a.dtype == b.dtype


@pytest.fixture(scope="module")
def albert():
    """rxnmapper's, with the weights it was trained to, and reactions of all lengths, padded."""
    from transformers import AlbertConfig, AlbertModel

    folder = shipped("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    model = AlbertModel(AlbertConfig(**json.loads((folder / "config.json").read_text()))).eval()
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    state = {name.removeprefix("albert."): x for name, x in state.items() if name.startswith("albert.")}
    model.load_state_dict(state, strict=False)
    lengths = torch.tensor([[3, 9, 5], [2, 2, 1], [7, 4, 7], [1, 6, 3]])
    batches = []
    for row in lengths:
        width = int(row.max())
        mask = torch.arange(width) < row[:, None]
        batches.append({"input_ids": torch.randint(10, 500, mask.shape) * mask, "attention_mask": mask.long()})
    return model, batches


LAYER = "encoder.albert_layer_groups.0.albert_layers.0"


def test_tokens_without_padding_of_all_calls_of_a_layer(albert, tmp_path):
    model, batches = albert
    acts = harvest(model, batches, LAYER, tmp_path, keep=["input_ids"], shard_bytes=100000, progress=False)
    sites = [LAYER, *(f"{LAYER}@{call}" for call in range(1, 12))]
    assert acts.sites == [*sites, "input_ids"]
    assert acts.manifest.shards > 1
    masks = [batch["attention_mask"].bool() for batch in batches]
    with torch.no_grad():
        states = [model(**batch, output_hidden_states=True).hidden_states[1:] for batch in batches]
    for call, site in enumerate(sites):
        assert acts[site].ragged
        rows = torch.cat([state[call][mask] for state, mask in zip(states, masks, strict=True)])
        assert equal(acts[site][:], rows.half()), site
    assert equal(acts["input_ids"][:], torch.cat([b["input_ids"][m] for b, m in zip(batches, masks, strict=True)]))
    samples, positions = acts[LAYER].keys()
    expected = [(b * 3 + i, place) for b, mask in enumerate(masks) for i in range(3) for place in range(mask[i].sum())]
    assert list(zip(samples.tolist(), positions.tolist(), strict=True)) == expected
    assert equal(acts[LAYER].of(7), states[2][0][1, : masks[2][1].sum()].half())


def test_a_sample_as_a_row_has_its_padding(albert, tmp_path):
    model, batches = albert
    wide = [batch for batch in batches if batch["input_ids"].shape[1] == 7]
    acts = harvest(model, wide, LAYER, tmp_path, rows="sample", dtype=None, progress=False)
    assert acts[LAYER].shape == (3, 7, 256) and not acts[LAYER].ragged
    assert equal(acts[LAYER][:], outputs(model, LAYER, wide)[0])


def test_a_transform_may_pool_and_may_give_a_list(albert, tmp_path):
    model, batches = albert

    def pooled(output):
        return first(output).mean(1)

    def halves(output):
        return [x[: 1 + number] for number, x in enumerate(first(output))]

    given = outputs(model, LAYER, batches)[::12]
    acts = harvest(model, batches, LAYER, tmp_path / "a", transform=pooled, dtype=None, stop=False, progress=False)
    assert equal(acts[LAYER][:], torch.cat([x.mean(1) for x in given]))
    acts = harvest(model, batches[::2], LAYER, tmp_path / "b", transform=halves, dtype="bfloat16", progress=False)
    rows = [x for batch in given[::2] for x in halves(batch)]
    assert equal(acts[LAYER][:], torch.cat(rows).bfloat16())
    assert [len(acts[LAYER].of(sample)) for sample in range(6)] == [1, 2, 3] * 2


def test_a_causal_model_without_a_mask(tmp_path):
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=3, n_head=3)).eval()
    batches = [{"input_ids": torch.randint(0, 50, (4, width))} for width in (9, 4, 1)]
    acts = harvest(model, batches, ["h.0", "h.2", "ln_f"], tmp_path / "a", progress=False)
    for path in acts:
        rows = [x.flatten(0, 1) for x in outputs(model, path, batches)]
        assert equal(acts[path][:], torch.cat(rows).half())
    stopped = harvest(model, batches, ["h.0"], tmp_path / "b", stop=True, progress=False)
    assert equal(stopped["h.0"][:], acts["h.0"][:])
    whole = len(acts["h.0"])
    assert whole == 4 * 14


def test_stopping_saves_the_rest(tmp_path):
    called = []
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    model[2].register_forward_hook(lambda *_: called.append(1))
    x = torch.randn(70, 3)
    acts = harvest(model, x, "1", tmp_path, stop=True, dtype=None, progress=False)
    with torch.no_grad():
        parts = [model[:2](part) for part in x.split(32)]
    assert equal(acts["1"][:], torch.cat(parts)) and not called


def test_what_a_later_layer_overwrites_is_kept_as_it_flowed(tmp_path):
    torch.manual_seed(0)
    model = InPlace().eval()
    oracle = OutOfPlace().eval()
    oracle.load_state_dict(model.state_dict())
    x = torch.randn(6, 3, 8, 8)
    acts = harvest(model, x, ["norm", "last"], tmp_path, dtype=None, batch_size=2, progress=False)
    for path in acts:
        assert equal(acts[path][:], torch.cat(outputs(oracle, path, x.split(2)))), path


def test_a_residual_network_and_its_targets(tmp_path):
    model = resnet18(num_classes=5).eval()
    data = TensorDataset(torch.randn(7, 3, 32, 32), torch.arange(7))
    sites = ["layer1.0.bn1", "layer4", "fc"]
    acts = harvest(model, DataLoader(data, 3, num_workers=2), sites, tmp_path, keep=["target"], progress=False)
    assert acts.sites == [*sites, "target"] and acts.samples.tolist() == list(range(7))
    for path in sites:
        assert equal(acts[path][:], torch.cat(outputs(model, path, data.tensors[0].split(3))).half())
    assert equal(acts["target"][:], torch.arange(7))


def test_a_trained_lstm_returns_tuples(tmp_path):
    state = torch.load(shipped("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=False)
    model = nn.LSTM(40, 256, 3, batch_first=True)
    model.load_state_dict({k.removeprefix("lstm."): v for k, v in state["model_state"].items() if "lstm" in k})
    x = torch.randn(5, 6, 40)
    with torch.no_grad():
        given = torch.cat([model(part)[0] for part in x.split(2)])
    for rows, shape in (("auto", (5, 6, 256)), ("token", (30, 256))):
        acts = harvest(model, x, "", tmp_path / rows, rows=rows, dtype="float32", batch_size=2, progress=False)
        assert acts[""].ragged == (rows == "token")
        assert equal(acts[""][:], given.view(shape))


def test_of_containers_the_first_tensor_and_of_shared_layers_every_call(tmp_path):
    x = torch.randn(5, 4)
    acts = harvest(Containers(), x, ["pair", "mapping", "data"], tmp_path / "a", dtype=None, progress=False)
    assert equal(acts["pair"][:], x * 2)
    model = Shared()
    acts = harvest(model, x, "first", tmp_path / "b", dtype=None, progress=False)
    assert acts.sites == ["first", "first@1", "first@2"]
    for site, rows in zip(acts, outputs(model, "first", [x]), strict=True):
        assert equal(acts[site][:], rows)


def test_a_compiled_model(tmp_path, nothing_compiled):
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    x = torch.randn(8, 4)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    acts = harvest(compiled, x, "0", tmp_path, dtype=None, batch_size=4, progress=False)
    torch.testing.assert_close(acts["0"][:], torch.cat(outputs(model, "0", x.split(4))))


def test_too_large_numbers_are_counted(tmp_path):
    x = torch.tensor([[1.0, -7e4, 3e38], [torch.inf, torch.nan, 65504.0], [65519.0, 65520.0, 2.0]])
    with (
        pytest.warns(UserWarning, match="the output of '' has 2 NaN or infinite values; they were stored"),
        pytest.warns(UserWarning, match=r"3 values of '' are too large for torch.float16"),
    ):
        acts = harvest(nn.Identity(), x, "", tmp_path / "a", progress=False)
    assert acts[""].overflow == 3 and acts[""].statistics.nonfinite == 2
    assert torch.equal(acts[""][:].nan_to_num(7), x.half().nan_to_num(7))
    with pytest.warns(UserWarning, match="has 2 NaN"):
        for dtype in ("bfloat16", None, "float64"):
            assert harvest(nn.Identity(), x, "", tmp_path / str(dtype), dtype=dtype, progress=False)[""].overflow == 0


@pytest.mark.parametrize("dtype", ["float16", None])
def test_statistics_are_those_of_all_values(tmp_path, dtype):
    model, x = nn.Sequential(nn.Linear(4, 5), nn.ReLU()), torch.randn(100, 4)
    acts = harvest(model, x, "1", tmp_path, dtype=dtype, batch_size=7, shard_bytes=100, progress=False)
    found, expected = acts["1"].statistics, Moments().of(torch.cat(outputs(model, "1", x.split(7))))
    for name, value in vars(expected).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-5), name


def test_two_harvests_are_the_same_files_and_anybody_reads_them(albert, tmp_path):
    model, batches = albert
    for name in "ab":
        harvest(model, batches, LAYER, tmp_path / name, keep=["input_ids"], shard_bytes=100000, progress=False)
    a, b = tmp_path / "a", tmp_path / "b"
    names = [str(path.relative_to(a)) for path in a.rglob("*") if path.is_file()]
    assert sorted(names) == sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file())
    assert filecmp.cmpfiles(a, b, names, shallow=False) == (names, [], [])
    acts = Activations.open(a)
    for site in acts:
        folder = a / "sites" / site.replace("@", "%40")
        shards = [load_file(path)["values"] for path in sorted(folder.glob("?????.safetensors"))]
        assert equal(torch.cat(shards), acts[site][:])
    ids = [load_file(path)["samples"] for path in sorted((a / "samples").iterdir())]
    assert torch.cat(ids).tolist() == list(range(12))
    assert acts.verify(False) > acts.nbytes


class Untidy(nn.Module):
    """Draws numbers, counts its calls, and would drop out."""

    def __init__(self):
        super().__init__()
        self.drop, self.norm, self.last = nn.Dropout(), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.norm(self.drop(x)) + 0 * torch.rand(1))


def test_nothing_of_the_model_is_changed(tmp_path):
    model = Untidy().train()
    model.norm.eval()
    model.last(torch.ones(1, 3)).sum().backward()
    model.last.register_forward_hook(lambda *_: None)
    hooks, modes = hooks_of(model), [module.training for module in model.modules()]
    state, grad = {k: v.clone() for k, v in model.state_dict().items()}, model.last.weight.grad.clone()
    x = torch.randn(50, 3)
    numbers = torch.get_rng_state()
    acts = harvest(model, x, "drop", tmp_path, dtype=None, progress=False)
    assert torch.equal(torch.get_rng_state(), numbers)
    assert hooks_of(model) == hooks and [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.last.weight.grad, grad) and torch.is_grad_enabled()
    assert equal(acts["drop"][:], x)  # in eval mode, a dropout drops nothing


def test_it_says_what_it_will_do(tmp_path, capsys):
    harvest(nn.Linear(3, 2), torch.randn(1000, 3), "", tmp_path / "out", batch_size=100)
    said = capsys.readouterr().err
    assert said.startswith(f"harvesting 1 site into {tmp_path / 'out'}: 1,000 samples to go: 3.9 KiB in about")
    harvest(nn.Linear(3, 2), iter([torch.randn(5, 3)]), "", tmp_path / "b", resume=False)
    assert "number of samples unknown" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def screen(monkeypatch):
    """What is drawn on stderr, which is a terminal; by its number of columns."""

    def drawn(columns, **options):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", Terminal())
            harvest(nn.Linear(3, 2), **options)
            return re.sub("\x1b[[][?0-9;]*[A-Za-z]", "", sys.stderr.getvalue())

    return drawn


def test_a_terminal_shows_samples_rows_and_bytes(tmp_path, screen):
    data = torch.rand(1000, 3)
    narrow = screen(80, data=data, sites="", out=tmp_path / "narrow", batch_size=100)
    assert "harvesting 1 site into" in narrow and re.search("samples +━+ +1000/1000 .* 1,000 rows  3.9 KiB", narrow)
    tokens = [torch.rand(10, 3)] * 100
    several = {"transform": lambda x: [row.expand(3, -1) for row in x], "rows": "auto"}
    wide = screen(120, data=tokens, sites="", out=tmp_path / "wide", **several)
    assert re.search("samples +━+ +1000/1000 .* 3,000 rows  11.7 KiB  [0-9,]+ rows/s  [0-9.]+ [KM]iB/s", wide)


def test_the_bar_is_silent_without_a_terminal_and_when_quiet(tmp_path, screen, capsys):
    data = torch.rand(1000, 3)
    assert screen(80, data=data, sites="", out=tmp_path / "quiet", progress=False) == ""
    harvest(nn.Linear(3, 2), data, "", tmp_path / "plain")
    said = capsys.readouterr()
    assert said.err.startswith("harvesting 1 site into") and said.err.count("\n") == 1 and not said.out
