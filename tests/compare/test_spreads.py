"""`compare.models`, `inputs` and `datasets`: distances against scipy, shifts that were planted, and a report."""

import gc
import itertools
import math
import pickle
import random

import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import nn

from specimens import hooks_of, resnet18
from torchhook.compare import distributions as spreads
from torchhook.compare import layer_pairs
from torchhook.compare.distributions import datasets, inputs, models
from torchhook.core.errors import SelectionError

pytestmark = pytest.mark.usefixtures("one_thread")


def net():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def test_distances_and_shifts_are_those_of_the_values():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    a, b = torch.randn(400, 4), torch.randn(300, 4) * 1.5 + 0.5
    result = inputs(model, a, b)
    assert [row.path for row in result.rows] == ["0", "1"] and result.others == ("x2",)
    with torch.no_grad():
        first, second = model[0](a), model[0](b)
    row = result.rows[0]
    exact = wasserstein_distance(first.flatten(), second.flatten()) / first.std()
    assert row.distance == pytest.approx(exact.item(), rel=0.05)  # which is by bins
    deviation = ((first.var(0) + second.var(0)) / 2).sqrt()
    torch.testing.assert_close(
        row.shifts, ((second.mean(0) - first.mean(0)) / deviation).double(), rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(row.ratios, (second.var(0) / first.var(0)).double(), rtol=1e-3, atol=1e-4)
    assert abs(row.shift) == pytest.approx(row.shifts.abs().max().item())
    assert result.ranked()[0].distance >= result.ranked()[1].distance


@pytest.mark.parametrize(("offset", "shift"), [(1000, 20), (1024, 1), (100, 2), (0, 1)])
def test_a_shift_far_from_zero_is_seen_as_it_is(offset, shift):
    """Bins are as wide as values are large: 1000 and 1020 are in the same one."""
    a, b = offset + torch.randn(1000, 4), offset + shift + torch.randn(1000, 4)
    result = inputs(nn.Sequential(nn.Identity()), a, b)
    (row,) = result.rows
    exact = wasserstein_distance(a.flatten(), b.flatten()) / float(a.std())
    assert 0.95 * exact < row.distance < 1.05 * exact
    assert [finding.code for finding in result.report.findings] == ["TH901"]
    wider = offset + 3 * torch.randn(1000, 4)
    assert inputs(nn.Sequential(nn.Identity()), a, wider).report.findings
    assert inputs(nn.Sequential(nn.Identity()), a, offset + torch.randn(1000, 4)).report.findings == ()


@pytest.mark.parametrize("batches", [5, 17, 33, 34, 65, 100, 257])
def test_noise_is_that_of_quarters_however_many_batches_there_are(batches):
    torch.manual_seed(0)
    data, model = torch.randn(batches * 8 - 4, 4), nn.Sequential(nn.Identity())
    noise = datasets(model, data.split(8), [data]).rows[0].noise
    quarters = datasets(model, data.chunk(4), [data]).rows[0].noise
    assert noise == pytest.approx(quarters, rel=0.75)
    snapshots = spreads._measured(model, map(spreads.Batch.of, data.split(8)), None)
    sizes = [snapshot["0"].count / data.numel() for snapshot in snapshots]
    assert len(sizes) in (3, 4) and min(sizes) > 0.15 and max(sizes) < 0.45, sizes


def test_a_small_batch_is_no_quarter():
    data = torch.randn(132, 4)
    for sizes in ([64, 64, 4], [4, 64, 64]):
        parts = spreads._measured(nn.Sequential(nn.Identity()), map(spreads.Batch.of, data.split(sizes)), None)
        assert sorted(part["0"].count // 4 for part in parts) == [64, 68]


def test_models_of_other_dtypes_and_buffers_that_a_forward_writes():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.fc(x)

    model = Counting()
    coarse = Counting().bfloat16()
    coarse.load_state_dict(model.state_dict())
    x = torch.randn(64, 4)
    (row,) = models({"fp32": model, "bf16": coarse}, x).rows
    assert row.distance < 0.02
    datasets(model, [x], [x])
    assert model.calls == 0 and coarse.calls == 0


def test_data_that_is_the_same_but_for_chance_is_not_found():
    model = net()
    for seed in range(10):
        draw = torch.Generator().manual_seed(seed)
        data = [(torch.randn(8, 3, 8, 8, generator=draw), torch.zeros(8)) for _ in range(16)]
        assert datasets(model, data[:8], data[8:]).report.findings == (), seed


def test_a_change_of_the_data_is_found_at_the_first_layer():
    model = net().train()
    hooks, state = hooks_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    data = [(torch.randn(8, 3, 8, 8), torch.zeros(8)) for _ in range(16)]
    result = datasets(model, data[:9], [(x * 2 + 1, y) for x, y in data[9:]])
    assert hooks_of(model) == hooks and model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    (finding,) = result.report.findings
    assert (finding.code, finding.site, str(finding.severity)) == ("TH901", "0", "error") and not result.report.ok
    assert result.reference == "train" and result.others == ("test",)
    assert repr(result).startswith("test against train: 5 layers, the furthest first\nlayer  distance")
    assert result.figure().axes[0].get_xlabel() == "distance from train (standard deviations)"
    assert "<td>0</td>" in result._repr_html_() and result.table("list")[0]["path"] == "0"


def test_what_is_kept_does_not_grow_with_the_data(monkeypatch):
    model, kept = nn.Linear(2, 2), []
    real = spreads._joined
    monkeypatch.setattr(spreads, "_joined", lambda windows: kept.append(len(windows)) or real(windows))
    x = torch.randn(400, 2)
    found = datasets(model, x.split(1), x.split(100))
    assert max(kept) <= math.ceil((spreads._WINDOWS + 1) / 4) and len(kept) > 50
    assert found.rows[0].distance == pytest.approx(0, abs=1e-6)


def test_models_the_first_of_which_is_the_reference():
    first, second, third = net().eval(), net().eval(), nn.Sequential(*net()[:3]).eval()
    second.load_state_dict(first.state_dict())
    third.load_state_dict({k: v for k, v in first.state_dict().items() if not k.startswith("4")})
    with torch.no_grad():
        second[4].bias += 3
    result = models({"a": first, "b": second, "c": third}, torch.randn(40, 3, 8, 8))
    assert [row.path for row in result.rows_of("b")] == list("01234")
    assert [row.distance == 0 for row in result.rows_of("b")] == [True] * 4 + [False]
    assert result.left_out == {"3": "it did not run in c", "4": "it did not run in c"}
    short = models({"a": first, "b": third, "c": third}, torch.randn(40, 3, 8, 8))
    assert short.left_out == {"3": "it did not run in b, c", "4": "it did not run in b, c"}
    (finding,) = result.report.findings
    assert finding.site == "4" and finding.message.startswith("b: its outputs are")
    assert "of  " in repr(result) and len(result.figure().axes[0].patches) == 8


def test_real_networks_of_which_one_is_deeper():
    from torchvision.models import resnet34

    result = models({"18": resnet18(), "34": resnet34()}, torch.randn(2, 3, 32, 32))
    assert len(result.rows) == 52 and result.left_out["layer4.2.bn2"] == "it did not run in 18"
    assert "… and 28 more rows: .table() has all" in repr(result)


def test_channels_that_are_not_the_same_and_one_sample():
    a, b = nn.Sequential(nn.Linear(3, 4)), nn.Sequential(nn.Linear(3, 5))
    given = torch.randn(20, 3)
    (row,) = models({"a": a, "b": b}, given).rows
    with torch.no_grad():
        first, second = a(given), b(given)  # all values together, since channels do not correspond
    assert row.shift == pytest.approx(
        float((second.mean() - first.mean()) / ((first.var() + second.var()) / 2).sqrt()), rel=1e-4
    )
    assert row.ratio == pytest.approx(float(second.var() / first.var()), rel=1e-4) and len(row.shifts) == 1
    result = inputs(a, torch.randn(1, 3), torch.randn(1, 3))
    assert result.report.notes == (
        "x1 could not be split into parts: how much its samples vary is unknown",
        "1 of 1 layers have a channel with fewer than two values: its shift and ratio are NaN",
    )
    assert result.rows[0].shifts.isnan().all() and math.isnan(result.rows[0].ratio)
    keywords = inputs(a, {"input": torch.randn(9, 3)}, {"input": torch.randn(5, 3)})
    assert len(keywords.rows) == 1


class Named(nn.Module):
    """The same layers as a Sequential, under other names."""

    def __init__(self, layers):
        super().__init__()
        self.layers = {f"stage{number}": layer for number, layer in enumerate(layers)}
        for name, layer in self.layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def test_the_same_layers_under_other_names():
    """Nothing differs because of a name, and what does differ is found as it is under the same names."""
    model, x = net().eval(), torch.randn(40, 3, 8, 8)
    changed = net().eval()
    changed.load_state_dict(model.state_dict())
    with torch.no_grad():
        changed[0].bias += 3
    same = models({"a": model, "b": Named(model)}, x)
    assert same.pairs == {"b": {str(k): f"stage{k}" for k in range(5)}} and {row.by for row in same.rows} == {"role"}
    assert {row.distance for row in same.rows} == {0.0} and not same.report.findings and same.report.notes == ()
    plain, named = models({"a": model, "b": changed}, x), models({"a": model, "b": Named(changed)}, x)
    for one, other in zip(plain.rows, named.rows, strict=True):
        assert one.distance == other.distance and one.shifts.equal(other.shifts) and one.ratios.equal(other.ratios)
    assert [(f.code, f.site) for f in named.report.findings] == [(f.code, f.site) for f in plain.report.findings] != []
    assert named.report.findings[0].message == f"in stage0: {plain.report.findings[0].message}"
    assert named.table("list")[0]["paired"] == "stage0" and named.table("list")[0]["by"] == "role"
    assert "paired with" in repr(named) and "paired with" not in repr(plain)


def test_different_architectures_are_paired_by_role_and_order_and_not_judged():
    from torchvision.models import squeezenet1_1

    torch.manual_seed(0)
    first, second = squeezenet1_1(num_classes=4), resnet18(num_classes=4)
    result = models({"squeezenet": first, "resnet": second}, torch.randn(4, 3, 64, 64))
    pairs = result.pairs["resnet"]
    families = (nn.Conv2d, nn.ReLU, (nn.MaxPool2d, nn.AdaptiveAvgPool2d))
    for path, paired in pairs.items():
        (family,) = (some for some in families if isinstance(first.get_submodule(path), some))
        assert isinstance(second.get_submodule(paired), family)
    assert (pairs["features.0"], pairs["features.1"], pairs["features.2"]) == ("conv1", "relu", "maxpool")
    assert pairs["classifier.3"] == "avgpool"
    assert sum(isinstance(second.get_submodule(paired), nn.Conv2d) for paired in pairs.values()) >= 19  # of 20
    assert all(math.isfinite(number) for row in result.rows for number in (row.distance, row.shift, row.ratio))
    assert not result.report.findings and "were paired by role" in result.report.notes[0]
    assert result.left_out["bn1 of resnet"] == "it has no counterpart, by role and order, in squeezenet"
    assert len(repr(result).splitlines()) < 30


@pytest.mark.parametrize("seed", range(20))
def test_the_alignment_is_the_best_there_is(seed):
    """Against every alignment: as many pairs as possible, then the nearest relative depths."""
    draw = random.Random(seed)
    a, b = ([draw.choice("xyz") for _ in range(draw.randint(1, 6))] for _ in range(2))
    found = layer_pairs._aligned(len(a), len(b), lambda i, j: a[i] == b[j])

    def value(pairs):
        return len(pairs), -sum(abs(i / max(len(a) - 1, 1) - j / max(len(b) - 1, 1)) for i, j in pairs)

    best = max(
        value(list(zip(rows, columns, strict=True)))
        for size in range(min(len(a), len(b)) + 1)
        for rows in itertools.combinations(range(len(a)), size)
        for columns in itertools.combinations(range(len(b)), size)
        if all(a[i] == b[j] for i, j in zip(rows, columns, strict=True))
    )
    assert value(found) == pytest.approx(best) and found == sorted(found)


def test_layers_with_the_same_path_are_pairs_even_in_another_order():
    first = {"a": "linear", "b": "linear", "c": "norm", "new": "activation"}
    second = {"b": "linear", "a": "linear", "c": "norm", "other": "activation"}
    assert [(pair.path, pair.paired, pair.by) for pair in layer_pairs.pairs_of(first, second)] == [
        *((path, path, "path") for path in "abc"),
        ("new", "other", "role"),
    ]


def test_the_parameters_of_the_layers_that_differ_most():
    model = net().eval()
    data = [torch.randn(8, 3, 8, 8) for _ in range(16)]
    result = datasets(model, data[:8], [x * 3 + 1 for x in data[8:]])
    expected = [row.path for row in result.ranked() if row.path in ("0", "1", "4")][:2]  # the others have none
    worst = result.worst(2)
    assert list(worst) == list(worst.paths) == expected and len(worst) == 2
    assert worst.names == tuple(f"{path}.{name}" for path in expected for name in ("weight", "bias"))
    own = dict(model.named_parameters())
    assert all(p is own[name] for p, name in zip(worst.parameters(), worst.names, strict=True))
    assert worst.distances == tuple(row.distance for row in result.ranked() if row.path in expected)
    assert result.worst(99).paths != () and len(result.worst(99)) == 3
    assert repr(worst).startswith("the 2 layers with parameters that differ most (")
    with pytest.raises(ValueError, match="k must be"):
        result.worst(0)
    with pytest.raises(ReferenceError, match="only the original has the parameters"):
        pickle.loads(pickle.dumps(result)).worst(1)
    assert sum(p.numel() for p in result.worst(1).parameters()) == sum(
        p.numel() for p in model.get_submodule(expected[0]).parameters()
    )
    del model, own
    gc.collect()
    with pytest.raises(ReferenceError, match="the model that was compared is gone"):
        result.worst(1)
    assert worst.paths  # what was asked for before stays


def test_what_is_refused():
    model, x = net(), torch.randn(4, 3, 8, 8)
    with pytest.raises(ValueError, match="models must be a mapping of names to at least two models"):
        models({"a": model}, x)
    with pytest.raises(ValueError, match="train_loader has no samples"):
        datasets(model, [], [x])
    with pytest.raises(
        TypeError, match="test_loader must be a tensor, a tuple or dict of them, or an iterable of such batches"
    ):
        datasets(model, [x], 7)
    with pytest.raises(SelectionError, match="sites: "):
        inputs(model, x, x, "conv")
    with pytest.raises(SelectionError, match=r"\(in models\['b'\]\)"):
        models({"a": model, "b": nn.Sequential(*net()[:3])}, x, "4")
    with pytest.raises(ValueError, match="x1 has no samples: its first dimension is 0"):
        inputs(model, x[:0], x)
    with pytest.raises(ValueError, match="test_loader has no samples"):
        datasets(model, [x], [x[:0]])
    with pytest.raises(ValueError, match="no layer of a has a counterpart in b"):
        models({"a": model, "b": nn.Sequential()}, x)
    with pytest.raises(TypeError, match="x2 must be an input"):
        inputs(model, x, "x")
