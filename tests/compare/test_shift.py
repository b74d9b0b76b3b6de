"""`shift`: the reference values on the digits, p-values that mean what they say, and peers where there are any."""

import re

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from torchhook.compare import distances
from torchhook.compare.auc import auc_of
from torchhook.compare.domain_shift import Shifts, shift
from torchhook.compare.layer_samples import Reservoir
from torchhook.core.errors import SelectionError

pytestmark = pytest.mark.usefixtures("one_thread")

DIGITS, LABELS = map(torch.tensor, load_digits(return_X_y=True))
THREES = DIGITS[LABELS == 3]
PAIRS = {
    "3 and 8": (THREES, DIGITS[LABELS == 8], (927.2856, 2.574783, 16.908797, 16.500525, 0.298218, 0.304203)),
    "halves": (DIGITS[:500], DIGITS[500:1000], (124.5834, 1.402972, 0.718535, 0.526571, 0.008659, 0.011103)),
    "the same": (THREES[::2], THREES[1::2], (84.4176, 0.591909, 0.534529, -0.227746, -0.005317, 0.008279)),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_reference_values(pair):
    source, target, expected = PAIRS[pair]
    result = shift(nn.Identity(), source.split(64), target.split(50), "", permutations=99)
    frechet, *others = expected
    assert result.frechet == pytest.approx(frechet, rel=2e-6)
    found = (result.coral, result.energy_biased, result.energy, result.mmd, result.mmd_biased)
    assert found == pytest.approx(others, abs=6e-7)
    assert (result.sources, result.targets) == (len(source), len(target))
    assert (result.p_value == 0.01) is (pair != "the same")
    assert 0.45 < result.auc < 0.55 if pair == "the same" else result.auc > 0.7


def test_energy_of_one_feature_is_the_square_of_scipys():
    x, y = THREES[:, 20:21], DIGITS[LABELS == 8][:, 20:21]
    result = shift(nn.Identity(), [x], [y], "", permutations=9)
    assert result.energy_biased == pytest.approx(stats.energy_distance(x[:, 0], y[:, 0]) ** 2, rel=1e-9)


def test_wide_features_give_the_same_distances_as_narrow_ones():
    """Features that say nothing new change neither; with them there are more features than samples."""
    x, y = torch.randn(30, 8).double(), torch.randn(25, 8).double() * 1.5 + 0.3
    wide = [torch.cat([side, torch.zeros(len(side), 92).double()], 1) for side in (x, y)]
    assert distances.frechet(*wide) == pytest.approx(distances.frechet(x, y), rel=1e-9)
    assert distances.coral(*wide) * 100**2 == pytest.approx(distances.coral(x, y) * 8**2, rel=1e-9)
    means = (x.mean(0) - y.mean(0)).square().sum()
    covariances = x.T.cov(), y.T.cov()
    root = torch.tensor(sqrtm((covariances[0] @ covariances[1]).numpy()).real)
    expected = means + covariances[0].trace() + covariances[1].trace() - 2 * root.trace()
    assert distances.frechet(x, y) == pytest.approx(float(expected), rel=1e-6)


def test_p_values_are_uniform_when_nothing_differs():
    """Each of 1/20 … 20/20 as often as another, over many draws; and 1/20 when all differs."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for _ in range(400):
        both = torch.randn(30, 3, generator=draw).double()
        kernel = torch.exp(-distances.squared_distances(both))
        found.append(distances.p_value(kernel, 12, 19, draw))
    counts = [sum(abs(p - k / 20) < 1e-9 for p in found) for k in range(1, 21)]
    assert sum(counts) == 400
    assert stats.chisquare(counts).pvalue > 0.01
    both[:12] += 5
    assert distances.p_value(torch.exp(-distances.squared_distances(both)), 12, 19, draw) == 1 / 20


def test_p_value_counts_ties():
    kernel = torch.ones(10, 10).double()
    assert distances.p_value(kernel, 5, 50, torch.Generator()) == 1


def test_classifier_is_the_one_of_scikit_learn():
    x, y = DIGITS[:300] + 0.0, DIGITS[300:560] + 0.0
    fitted = distances._LogisticRegression(x, y)
    peer = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-8, max_iter=2000))
    both, labels = torch.cat([x, y]).numpy(), [0] * 300 + [1] * 260
    peer.fit(both, labels)
    ours = fitted(DIGITS[560:800])
    assert ours.numpy() == pytest.approx(peer.decision_function(DIGITS[560:800].numpy()), abs=2e-3)
    scores = fitted(torch.cat([x, y]))
    assert auc_of(scores[300:], scores[:300]).value == pytest.approx(roc_auc_score(labels, scores), rel=1e-12)


def test_channels_that_drive_it_come_first():
    source, target = torch.randn(200, 6, 4, 4), torch.randn(150, 6, 4, 4)
    target[:, 2] += 0.5
    target[:, 4] += 0.8 * torch.randn(150, 1, 1)  # the same mean, a larger variance
    result = shift(nn.Sequential(nn.BatchNorm2d(6)).eval(), source.split(64), target.split(64), "0", permutations=99)
    assert [drift.channel for drift in result.channels[:2]] == [2, 4]
    first, second = result.channels[:2]
    assert first.shift > 1.5
    assert abs(second.shift) < 0.5 < 3 < second.variance_ratio
    assert len(result.channels) == 6
    assert result.table("list")[0]["channel"] == 2


def test_the_mean_distance_is_that_of_all_samples_also_of_those_that_are_not_kept():
    source, target = DIGITS[:700].view(-1, 1, 8, 8), DIGITS[700:1300].view(-1, 1, 8, 8) * 1.5
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU()).double()
    with torch.no_grad():
        sides = [model(x).numpy() for x in (source, target)]
    for pool, axes in (("flatten", (0,)), ("mean", (0, 2, 3))):
        expected = np.linalg.norm(sides[0].mean(axes) - sides[1].mean(axes))
        for most in (2000, 50):
            found = shift(model, source.split(64), target.split(50), "1", pool=pool, permutations=9, max_samples=most)
            assert found.mean_distance == pytest.approx(expected, rel=1e-9) and found.share == 1
    assert f"mean_distance  {found.mean_distance:.4g}" in repr(found)


def test_several_layers_and_the_share_of_each():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).double()
    source, target = DIGITS[:300], DIGITS[300:600] + 1
    with torch.no_grad():
        outputs = [[layer(x).numpy().mean(0) for layer in (model[0], model[:2], model)] for x in (source, target)]
    norms = [float(np.linalg.norm(a - b)) for a, b in zip(*outputs, strict=True)]
    draw, alone = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    found = shift(model, source.split(64), target.split(50), ["0", nn.ReLU, "2"], permutations=9, generator=draw)
    assert list(found) == ["0", "1", "2"] and isinstance(found, Shifts)
    assert [layer.mean_distance for layer in found.values()] == pytest.approx(norms, rel=1e-9)
    assert [layer.share for layer in found.values()] == pytest.approx([n / sum(norms) for n in norms], rel=1e-9)
    one = shift(model, source.split(64), target.split(50), "1", permutations=9, generator=alone)
    assert (one.p_value, one.auc, one.mmd) == (found["1"].p_value, found["1"].auc, found["1"].mmd)
    assert torch.equal(draw.get_state(), alone.get_state()) and one.share == 1
    assert list(shift(model, [source], [target], "*", permutations=9)) == ["0", "1", "2"]
    assert list(shift(model, [source], [target], ["0"], permutations=9)) == ["0"]
    assert found.ranked()[0].share == max(layer.share for layer in found.values())
    assert found.table("list")[1]["mean_distance"] == found["1"].mean_distance
    assert repr(found).startswith("Shift at 3 layers: 300 source and 300 target samples\nlayer  share")


def test_the_old_name_of_sites_still_works():
    with pytest.warns(DeprecationWarning, match=r"shift\(site=...\) is now shift\(sites=...\)"):
        assert shift(nn.Identity(), [DIGITS[:50]], [DIGITS[50:99]], site="", permutations=9).share == 1


def test_layers_that_cannot_be_compared_are_left_out_of_several():
    class Odd(nn.Sequential):
        def forward(self, x):
            return super().forward(x) if len(x) > 40 else self[0](x)

    model = Odd(nn.Linear(64, 4), nn.ReLU(), nn.Threshold(1e9, 0.0)).double()
    found = shift(model, DIGITS[:100].split(50), DIGITS[100:180].split(50), [nn.Module], permutations=9)
    assert "0" in found and "1" not in found
    assert found.left_out["'1'"] == "'1' was not called in every batch of target"
    assert "left out: see .left_out" in repr(found) and "left out" in found._repr_html_()


def test_constant_channels():
    source, target = torch.randn(40, 3), torch.randn(40, 3)
    source[:, 0] = target[:, 0] = 1
    source[:, 1], target[:, 1] = 1, 2
    result = shift(nn.Identity(), [source], [target], "", permutations=9)
    assert result.channels[0][:2] == (1, float("inf"))
    assert result.channels[-1] == (0, 0.0, 1.0, 0.0)


def test_same_seed_same_result_and_nobodys_random_numbers():
    before = torch.get_rng_state()
    args = (nn.Dropout(), [DIGITS[:60]], [DIGITS[60:120]], "")
    results = [shift(*args, permutations=99) for _ in range(2)]
    other = shift(*args, permutations=99, generator=torch.Generator().manual_seed(5))
    assert results[0].p_value == results[1].p_value
    assert results[0].auc == results[1].auc != other.auc
    assert torch.equal(torch.get_rng_state(), before)


def test_large_data_sets_are_drawn_from_evenly():
    result = shift(nn.Identity(), DIGITS.split(100), DIGITS[:90].split(7), "", max_samples=80, permutations=9)
    assert (result.sources, result.targets) == (80, 80)
    drawn = Reservoir(500, torch.Generator().manual_seed(0))
    for part in torch.arange(5000.0)[:, None].split(37):
        drawn.add(None, part)
    assert drawn.seen == 5000
    assert len(drawn.rows.unique()) == 500
    assert stats.kstest(drawn.rows[:, 0], stats.uniform(0, 5000).cdf).pvalue > 0.01


def test_what_is_in_place_and_called_twice():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            return self.relu(self.relu(x).sub_(8.0))

    model = Twice().train()
    source, target = DIGITS[:50], DIGITS[50:120]
    with pytest.raises(ValueError, match=r"'relu' is called 2 times per batch: pass call="):
        shift(model, [source], [target], "relu")
    first = shift(model, [source], [target], "relu", call=0, permutations=9)
    assert first.frechet == pytest.approx(distances.frechet(source, target), rel=1e-6)
    assert model.training
    assert not model.relu._forward_hooks


def test_refusals_say_what_to_do():
    model = nn.Sequential(nn.Linear(64, 3), nn.Linear(3, 3)).double()
    with pytest.raises(SelectionError, match=r"sites: .*nope"):
        shift(model, [DIGITS], [DIGITS], "nope")
    with pytest.raises(KeyError, match=r"no layer '2' was compared; nearest: '0', '1'"):
        shift(model, [DIGITS[:9]], [DIGITS[9:18]], nn.Linear, permutations=9)["2"]
    with pytest.raises(ValueError, match=r"no layer can be compared: '0' has values that are not finite"):
        shift(model, [DIGITS[:9] / 0], [DIGITS[:9]], ["0"])
    with pytest.raises(ValueError, match=r"target has 3 samples, but 5 are needed"):
        shift(model, [DIGITS], [DIGITS[:3]], "0")
    with pytest.raises(ValueError, match=r"source has 0 samples"):
        shift(model, [], [DIGITS], "0")
    with pytest.raises(
        TypeError, match="source must be a tensor, a tuple or dict of them, or an iterable of such batches"
    ):
        shift(model, 7, [DIGITS], "0")
    with pytest.raises(ValueError, match=r"'0' has values that are not finite for source"):
        shift(model, [DIGITS / 0], [DIGITS], "0")
    with pytest.raises(ValueError, match=r"64 features per sample for source and 32 for target"):
        shift(nn.Identity(), [DIGITS], [DIGITS[:, :32]], "")
    with pytest.raises(ValueError, match=r"is the same for every sample"):
        shift(nn.Identity(), [DIGITS * 0], [DIGITS * 0], "")


def test_reads_in_a_terminal_and_a_notebook():
    result = shift(nn.Sequential(nn.Flatten()), [THREES], [DIGITS[LABELS == 8]], "0", permutations=99)
    assert "Shift at '0': 183 source and 174 target samples, p = 0.01" in repr(result)
    assert re.search(r"^frechet +927\.3$", repr(result), re.MULTILINE)
    assert "10 of 64 channels that differ most: see .table() for all" in repr(result)
    assert "10 of 64 channels" in result._repr_html_()
