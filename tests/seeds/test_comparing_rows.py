"""The rows of comparing and pruning: C18, C23, C28, C29, C36, C41, C42, B05."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.linalg import sqrtm
from scipy.stats import wasserstein_distance
from sklearn.datasets import load_digits
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
    pruned = th.prune.apply(model, th.prune.plan(found, ratio=8 / 64), loader=[(x[:400], y[:400])])
    assert pruned.model[0].out_features + pruned.model[2].out_features == 56
    assert pruned.loss.after == pytest.approx(pruned.loss.before, rel=1e-5)


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


def test_c41_different_architectures_through_one_interface(digits):
    x, _ = digits
    convolutional = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten())
    found = th.compare.cka(net(), convolutional, x.split(100))
    assert found.rows == ("0", "1", "2", "3", "4") and found.matrix.shape == (5, len(found.columns))
    assert found.matrix.isfinite().all() and found.matrix.max() <= 1 + 1e-9


def test_c42_where_a_model_may_leak_what_it_was_trained_on(digits):
    x, _ = digits
    torch.manual_seed(0)
    wrong = torch.randint(10, (200,))  # which can only be known by heart
    model = net(128)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(250):
        loss = F.cross_entropy(model(x[:200]), wrong)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    members, others = [(x[:200], wrong)], [(x[200:400], torch.randint(10, (200,)))]
    found = th.compare.leakage(model, members, others, F.cross_entropy, draws=50)
    (loss,) = [signal for signal in found.table() if signal["signal"] == "loss"]
    assert loss["auc"] > 0.9


def test_b05_where_two_models_first_part(digits):
    x, _ = digits
    original = net()
    ported = copy.deepcopy(original)
    ported[2].weight.data = ported[2].weight.data.T.clone()
    found = th.diff(original, ported, x[:8])
    assert (found.first.path, found.module) == ("2", "2") and "a and b diverge at 2 (Linear)" in found.verdict
    assert th.diff(original, copy.deepcopy(original).bfloat16(), x[:8]).first is None
