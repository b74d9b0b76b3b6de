"""The rows of comparing and pruning: C18, C23, C28, C29, C36, C41, C42, B05, B15."""

import copy
import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import sqrtm
from scipy.stats import wasserstein_distance
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

import torchhook as th

pytestmark = pytest.mark.usefixtures("one_thread")


def net(width=16):
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


def test_c18_several_models_on_the_same_input(digits):
    x, _ = digits
    first = net()
    changed = copy.deepcopy(first)
    changed[2].weight.data *= 3
    found = th.compare.models({"first": first, "same": copy.deepcopy(first), "changed": changed}, x[:256])
    assert {row.distance for row in found.rows_of("same")} == {0.0}
    assert found.ranked()[0].other == "changed" and found.rows_of("changed")[0].distance == 0
    with torch.no_grad():
        before, after = (model[:3](x[:256]).flatten().double().numpy() for model in (first, changed))
    exact = wasserstein_distance(before, after) / before.std()
    assert found.rows_of("changed")[2].distance == pytest.approx(exact, rel=0.05)


class Renamed(nn.Module):
    """The layers of `net`, with others between them, under other names."""

    def __init__(self, layers):
        super().__init__()
        self.entry, self.act, self.norm = layers[0], nn.GELU(), nn.LayerNorm(16)
        self.middle, self.drop, self.out = layers[2], nn.Dropout(), layers[4]

    def forward(self, x):
        return self.out(self.drop(torch.relu(self.middle(self.norm(self.act(self.entry(x)))))))


def test_c18_different_architectures_are_paired_by_role_and_order(digits):
    x, _ = digits
    first, other = net(), Renamed(net())
    found = th.compare.models({"first": first, "other": other}, x[:256])
    assert found.pairs == {"other": {"0": "entry", "1": "act", "2": "middle", "4": "out"}}
    assert [(row.path, row.paired, row.by) for row in found.rows][:2] == [("0", "entry", "role"), ("1", "act", "role")]
    assert found.rows[0].distance == 0 < found.rows[2].distance  # the same weights, on other inputs
    assert all(math.isfinite(number) for row in found.rows for number in (row.distance, row.shift, row.ratio))
    assert not found.report.findings and set(found.left_out) == {"3 of first", "norm of other", "drop of other"}
    with torch.no_grad():
        before, after = first[:2](x[:256]).double(), other.act(first[0](x[:256])).double()
    expected = (after.mean() - before.mean()) / ((before.var() + after.var()) / 2).sqrt()
    assert found.rows[1].shift == pytest.approx(float(expected), rel=1e-3)
    assert found.rows[1].ratio == pytest.approx(float(after.var() / before.var()), rel=1e-3)


def test_c23_distributions_compared_between_two_inputs(digits):
    x, _ = digits
    same, other = (th.compare.inputs(net(), x[:800], there) for there in (x[800:1600], x[800:1600] + 2))
    assert max(row.distance for row in same.rows) < 0.3 < min(row.distance for row in other.rows)
    distances = by_scipy(net(), x[:800], x[800:1600] + 2)
    assert [row.distance for row in other.rows] == pytest.approx(distances, rel=0.05)


def outputs(model, x):
    """What each layer returns, one after the other."""
    with torch.no_grad():
        return [x := layer(x) for layer in model]


def by_scipy(model, x, other):
    """How far the values of each layer are from one another, in standard deviations of the first."""
    pairs = zip(outputs(model, x), outputs(model, other), strict=True)
    return [wasserstein_distance(a.flatten(), b.flatten()) / a.std().item() for a, b in pairs]


def test_c28_importance_and_pruning_that_really_removes_channels(digits):
    x, y = digits
    model = net(32)
    with torch.no_grad():
        model[2].weight[:, :8] = 0  # nothing of these eight is used
    found = th.prune.importance(model, [(x[:200], y[:200]), (x[200:400], y[200:400])], loss=F.cross_entropy)
    assert (found["0"][:8] == 0).all() and (found["0"] > 0).sum() > 16
    hidden = model[0](x[:400]).detach().requires_grad_()
    F.cross_entropy(model[1:](hidden), y[:400], reduction="sum").backward()
    by_hand = (hidden.grad * hidden).abs().mean(0)  # what each sample would lose without a channel, to first order
    torch.testing.assert_close(found["0"].float(), by_hand.detach(), rtol=1e-4, atol=1e-7)
    pruned = th.prune.apply(
        model, th.prune.plan(found, ratio=8 / 64), loader=[(x[:100], y[:100]), (x[100:400], y[100:400])]
    )
    assert pruned.model[0].out_features + pruned.model[2].out_features == 56
    loss = F.cross_entropy(model(x[:400]), y[:400]).item()
    assert (pruned.loss.before, pruned.loss.after) == pytest.approx((loss, loss), rel=1e-5)
    left = F.cross_entropy(pruned.model(x[:400]), y[:400]).item()
    assert left == pytest.approx(loss, rel=1e-5) and pruned.parameters.after == sum(
        parameter.numel() for parameter in pruned.model.parameters()
    )


def test_c29_distance_between_two_domains_at_a_layer(digits):
    x, _ = digits
    same = th.compare.shift(net(), x[:300].split(64), x[300:600].split(50), "1", permutations=99)
    far = th.compare.shift(net(), x[:300].split(64), (x[300:600] * 2).split(50), "1", permutations=99)
    assert far.p_value == 0.01 and far.auc > 0.8 > same.auc
    a, b = (outputs(net(), side)[1].double().numpy() for side in (x[:300], x[300:600] * 2))
    covariances = [np.cov(side, rowvar=False) for side in (a, b)]
    root = sqrtm(covariances[0] @ covariances[1]).real
    exact = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(covariances[0] + covariances[1] - 2 * root)
    assert far.frechet == pytest.approx(exact, rel=1e-3) and far.frechet > same.frechet
    assert far.mean_distance == pytest.approx(np.linalg.norm(a.mean(0) - b.mean(0)), rel=1e-6) and far.share == 1


def test_c29_the_share_of_each_layer_in_the_distance_of_the_means(digits):
    x, _ = digits
    model, target = net(), x[300:600] * 2
    found = th.compare.shift(model, x[:300].split(64), target.split(50), nn.Linear, permutations=9)
    means = [[output.double().numpy().mean(0) for output in outputs(model, side)[::2]] for side in (x[:300], target)]
    norms = [np.linalg.norm(a - b) for a, b in zip(*means, strict=True)]
    assert list(found) == ["0", "2", "4"]
    assert [layer.mean_distance for layer in found.values()] == pytest.approx(norms, rel=1e-6)
    assert [layer.share for layer in found.values()] == pytest.approx([norm / sum(norms) for norm in norms], rel=1e-6)


def test_c36_train_against_deployed_features_and_the_layers_that_differ_most(digits):
    x, y = digits
    train = [(x[n : n + 64], y[n : n + 64]) for n in range(0, 896, 64)]
    model = net()
    assert not th.compare.datasets(model, train[::2], train[1::2]).report.findings
    found = th.compare.datasets(model, train, [(batch.flip(1) * 3, target) for batch, target in train])
    assert [finding.code for finding in found.report.findings] == ["TH901"]
    assert found.ranked()[0].distance > 0.5 and len(found.rows) == 5
    seen = torch.cat([batch for batch, _ in train])
    distances = by_scipy(model, seen, seen.flip(1) * 3)
    assert [row.distance for row in found.rows] == pytest.approx(distances, rel=0.05)
    assert found.ranked()[0].distance == max(row.distance for row in found.rows)


def test_c36_the_parameters_of_the_layers_that_differ_most(digits):
    x, _ = digits
    model = net()
    far = by_scipy(model, x[:900], x[900:] * 3)
    first, second = sorted((0, 2, 4), key=lambda n: -far[n])[:2]
    worst = th.compare.datasets(model, x[:900].split(100), (x[900:] * 3).split(100)).worst(2)
    assert worst.paths == (str(first), str(second))
    expected = [*model[first].parameters(), *model[second].parameters()]
    assert [id(p) for p in worst.parameters()] == [id(p) for p in expected]
    assert worst.names == tuple(f"{n}.{name}" for n in (first, second) for name in ("weight", "bias"))


def unbiased_hsic(x, y):
    """Song et al. 2012, with whole Gram matrices."""
    k, h, n = x @ x.T, y @ y.T, len(x)
    np.fill_diagonal(k, 0)
    np.fill_diagonal(h, 0)
    rest = k.sum() * h.sum() / ((n - 1) * (n - 2)) - 2 * (k @ h).sum() / (n - 2)
    return (np.trace(k @ h) + rest) / (n * (n - 3))


def test_c41_different_architectures_through_one_interface(digits):
    x, _ = digits
    torch.manual_seed(1)
    first = net()
    second = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    found = th.compare.cka(first, second, x[:500].split(100))
    assert found.rows == ("0", "1", "2", "3", "4") and found.columns == ("0", "1", "2", "3", "4") and found.exact.all()
    sides = [[layer.flatten(1).double().numpy() for layer in outputs(model, x[:500])] for model in (first, second)]
    own = [[unbiased_hsic(layer, layer) for layer in side] for side in sides]
    expected = [
        [unbiased_hsic(a, b) / np.sqrt(own[0][i] * own[1][j]) for j, b in enumerate(sides[1])]
        for i, a in enumerate(sides[0])
    ]
    np.testing.assert_allclose(found.matrix.numpy(), expected, rtol=1e-5, atol=1e-7)
    assert 0.05 < np.min(expected) < 0.3 < 0.7 < np.max(expected) < 1


def test_c42_where_a_model_may_leak_what_it_was_trained_on(digits):
    x, _ = digits
    torch.manual_seed(0)
    wrong = torch.randint(10, (200,))  # which can only be known by heart
    model = net(128)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        loss = F.cross_entropy(model(x[:200]), wrong)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    inside, outside = (x[:200], wrong), (x[200:400], torch.randint(10, (200,)))
    found = th.compare.leakage(model, [inside], [outside], F.cross_entropy, draws=50)
    sides = [each_sample(model, *side) for side in (inside, outside)]
    for name in ("loss", "confidence", "entropy", "gradient norm"):
        scores, member = np.concatenate([side[name] for side in sides]), np.repeat([1, 0], 200)
        expected = roc_auc_score(member, scores)
        assert 0.55 < expected < 1 and found[name].auc.value == pytest.approx(expected, abs=1e-4), name
        others = np.sort(scores[200:])[::-1]
        assert found[name].tpr_1.value == pytest.approx(np.mean(scores[:200] > others[2]), abs=0.01), name  # 1 % of 200
    assert found["loss"].auc.low > 0.8
    assert found.signals[0].auc.value == max(signal.auc.value for signal in found.signals)


def each_sample(model, x, y):
    """The signals of each sample, all the larger the more it looks like a member: with autograd, one by one."""
    found = {"loss": [], "confidence": [], "entropy": [], "gradient norm": []}
    for sample, target in zip(x, y, strict=True):
        logits = model(sample[None])
        loss = F.cross_entropy(logits, target[None])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        others = torch.cat([logits[0, :target], logits[0, target + 1 :]])
        p = logits[0].softmax(0)
        found["loss"].append(-loss.item())
        found["confidence"].append((logits[0, target] - others.logsumexp(0)).item())
        found["entropy"].append((p * p.log()).sum().item())
        found["gradient norm"].append(-torch.cat([g.flatten() for g in gradients]).norm().item())
    return found


def test_b05_where_two_models_first_part(digits):
    x, _ = digits
    original = net()
    ported = copy.deepcopy(original)
    ported[2].weight.data = ported[2].weight.data.T.clone()
    found = th.diff(original, ported, x[:8])
    assert (found.first.path, found.module) == ("2", "2") and "a and b diverge at 2 (Linear)" in found.verdict
    assert th.diff(original, copy.deepcopy(original).bfloat16(), x[:8]).first is None


def test_b15_recordings_of_two_processes_part_at_the_module_at_fault(tmp_path):
    """One side has split projections, the other fused ones with other names, each recorded in its own process."""
    script = """
        import sys, torch, torch.nn.functional as F, torchhook as th
        from torch import nn

        class Attention(nn.Module):
            def __init__(self, fused):
                super().__init__()
                if fused:
                    self.qkv = nn.Linear(32, 96)
                else:
                    self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
                self.fused, self.project = fused, nn.Linear(32, 32)

            def forward(self, x):
                q, k, v = self.qkv(x).chunk(3, -1) if self.fused else (self.query(x), self.key(x), self.value(x))
                return self.project(F.scaled_dot_product_attention(q, k, v, is_causal=True))

        torch.manual_seed(0)
        split, x = nn.Sequential(*(Attention(False) for _ in range(3))), torch.randn(4, 16, 32)
        if sys.argv[1] != "split":
            fused = nn.Sequential(*(Attention(True) for _ in range(3)))
            for mine, theirs in zip(fused, split):
                parts = [theirs.query, theirs.key, theirs.value]
                mine.qkv.weight.data = torch.cat([part.weight.data for part in parts])
                mine.qkv.bias.data = torch.cat([part.bias.data for part in parts])
                mine.project = theirs.project
            if sys.argv[1] == "faulty":
                fused[1].qkv.weight.data[32:64] = fused[1].qkv.weight.data[:32].clone()
        th.record(split if sys.argv[1] == "split" else fused, x, to=sys.argv[1] + sys.argv[2], keep=sys.argv[2][1:])
    """
    for keep in (".all", ".sketch"):
        for side in ("split", "fused", "faulty"):
            subprocess.run([sys.executable, "-c", textwrap.dedent(script), side, keep], cwd=tmp_path, check=True)
        assert th.diff(tmp_path / f"split{keep}", tmp_path / f"fused{keep}").same
        found = th.diff(tmp_path / f"split{keep}", tmp_path / f"faulty{keep}")
        assert (found.module, found.first.path) == ("1.key", "1.key")
        assert found.match[0].a == ("*.query", "*.key", "*.value") and found.match[0].b == ("*.qkv",)
