"""The measures, against published numbers, closed formulas and what they must not depend on."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchhook.compare.accumulators import Alignments, LayerFeatures, PairMoments, Products, exact_width, in_full
from torchhook.compare.features import LayerCall
from torchhook.compare.measures import DEBIASED_CKA, MEASURES, likeness, moments, u_centred, unbiased

pytestmark = pytest.mark.usefixtures("one_thread")

BIASED_CKA = MEASURES["cka"]


@pytest.fixture(scope="module")
def demo():
    """The features of Kornblith's notebook."""
    random = np.random.RandomState(1337)
    x = random.randn(100, 10)
    return torch.tensor(x), torch.tensor(random.randn(100, 10) + x)


def hsic(x, y):
    """The unbiased estimate times n (n - 3), as it is written in the papers."""
    n = len(x)
    k, m = (products - products.diag().diag() for products in (x @ x.T, y @ y.T))
    return (k @ m).trace() + k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * (k @ m).sum() / (n - 2)


def closed(x, y):
    """Debiased CKA by the formula."""
    return float(hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt())


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_published_numbers(demo, offset):
    x, y = (features + offset for features in demo)
    assert likeness(x, y, BIASED_CKA) == pytest.approx(0.55761, abs=5e-6)
    assert likeness(x, y, DEBIASED_CKA) == pytest.approx(0.51346, abs=5e-6)
    assert likeness(x, y, MEASURES["cca"]) == pytest.approx(0.73101, abs=5e-6)
    assert likeness(x, y, MEASURES["svcca"]) == pytest.approx(0.73101, abs=5e-6)
    assert 2 - 2 * likeness(x, y, MEASURES["procrustes"]) == pytest.approx(0.52749, abs=5e-6)
    assert math.acos(likeness(x, y, MEASURES["procrustes"])) == pytest.approx(0.74328, abs=5e-6)


def test_pwcca_weighs_canonical_variables_by_what_they_account_for(demo):
    """By its definition: the variables themselves, orthonormal over the samples, projected on the features."""
    x, y = (features - features.mean(0) for features in demo)
    left, right = (torch.linalg.qr(features)[0] for features in (x, y))
    u, values, _ = torch.linalg.svd(left.T @ right)
    weights = ((left @ u).T @ x).abs().sum(1)
    expected = float((weights * values).sum() / weights.sum())
    assert likeness(*demo, MEASURES["pwcca"]) == pytest.approx(expected, rel=1e-10)
    assert expected == pytest.approx(0.73467, abs=5e-6)


def test_unbiased_estimate_equals_its_formula_both_ways(demo):
    x, y = demo
    assert float(unbiased(moments(x, y))) == pytest.approx(float(hsic(x, y)), rel=1e-9)
    products = u_centred(x @ x.T) * u_centred(y @ y.T)
    assert float(products.sum()) == pytest.approx(float(hsic(x, y)), rel=1e-9)


def test_svcca_leaves_out_what_varies_little():
    generator = torch.Generator().manual_seed(0)
    shared, x_noise, y_noise = torch.randn(3, 500, 4, generator=generator).double().unbind()
    x, y = torch.cat([shared, 1e-3 * x_noise], 1), torch.cat([shared, 1e-3 * y_noise], 1)
    assert likeness(x, y, MEASURES["svcca"]) > 0.99
    assert likeness(x, y, MEASURES["cca"]) < 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 10.0])
def test_directions_that_are_rounding_do_not_correlate(dtype, offset):
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(2000, 4, generator=generator).double()
    x, y = (shared @ torch.randn(4, 16, generator=generator).double() + offset for _ in range(2))
    for by in ("cca", "pwcca"):
        exact, rounded = (likeness(x.to(of), y.to(of), MEASURES[by]) for of in (torch.float64, dtype))
        assert exact == pytest.approx(1, abs=1e-9)
        assert rounded == pytest.approx(1, abs=0.02 if dtype == torch.bfloat16 else 1e-6)


def test_layers_that_are_mostly_rounding_keep_their_largest_direction():
    x = (torch.randn(500, 6, generator=torch.Generator().manual_seed(0)) + 300).bfloat16()
    for by in ("cca", "svcca", "pwcca"):
        assert likeness(x, x, MEASURES[by]) == pytest.approx(1)


def test_pwcca_takes_the_weights_of_the_first_of_two_equally_wide_layers(demo):
    x, y = demo
    pwcca = MEASURES["pwcca"]
    assert abs(likeness(x, y, pwcca) - likeness(y, x, pwcca)) > 1e-4
    assert likeness(x[:, :4], y, pwcca) == pytest.approx(likeness(y, x[:, :4], pwcca), rel=1e-9)


def test_correlations_of_layers_with_dead_and_repeated_features(demo):
    x, y = demo
    more = torch.cat([x, torch.zeros(100, 3).double(), x[:, :2]], 1)
    for by in ("cca", "svcca"):
        assert likeness(more, y, MEASURES[by]) == pytest.approx(likeness(x, y, MEASURES[by]), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(1e-3, 1e3), offset=st.floats(-1e3, 1e3), p=st.integers(1, 12))
def test_rotation_scale_and_offset_change_nothing(seed, scale, offset, p):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, p, generator=generator).double(), torch.randn(40, 5, generator=generator).double()
    y[:, 0] += x[:, 0]
    rotation = torch.linalg.qr(torch.randn(p, p, generator=generator).double())[0]
    moved = x @ rotation * scale + offset
    for by in (DEBIASED_CKA, BIASED_CKA, MEASURES["cca"], MEASURES["procrustes"]):
        assert likeness(moved, y, by) == pytest.approx(likeness(x, y, by), rel=1e-6, abs=1e-8)
        assert likeness(moved, x, by) == pytest.approx(1, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(1, 59), max_size=6, unique=True))
def test_moments_are_the_same_for_every_split(seed, cuts):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(60, 3, generator=generator).double() + 1e4, torch.randn(60, 8, generator=generator).double()
    y[:, :3] += x
    found = PairMoments(
        [LayerFeatures(LayerCall("x", 0), x)], [LayerFeatures(LayerCall("y", 0), y)], torch.device("cpu")
    )
    for part, other in zip(x.tensor_split(sorted(cuts)), y.tensor_split(sorted(cuts)), strict=True):
        found.add([part], [other])
    found.settle()
    own = (DEBIASED_CKA.own(found.own(side, 0), 0.0) for side in (0, 1))
    assert float(DEBIASED_CKA.joint(*own, found.pair(0, 0))) == pytest.approx(
        closed(x - x.mean(0), y - y.mean(0)), rel=1e-5
    )


def test_groups_give_an_unbiased_estimate_of_hsic():
    """Over many draws of groups, its mean is the value of all samples; that of the usual estimate is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator).double()
    y = x[:, :3] + torch.randn(400, 3, generator=generator).double()
    whole = float(hsic(x, y)) / (400 * 397)
    draws = []
    for _ in range(3000):
        some = torch.randperm(400, generator=generator)[:8]
        draws.append(float((u_centred(x[some] @ x[some].T) * u_centred(y[some] @ y[some].T)).sum()) / (8 * 5))
    draws = torch.tensor(draws)
    error = float(draws.std()) / len(draws) ** 0.5
    assert abs(float(draws.mean()) - whole) < 3.5 * error
    assert error < 0.05 * whole  # so that this says something


def test_groups_wait_for_one_another_and_the_last_ones_count():
    layer = LayerFeatures(LayerCall("x", 0), torch.randn(3, 5))
    assert not layer.groups(torch.randn(3, 5))  # too few
    assert [len(group) for group in layer.groups(torch.randn(40, 5))] == [43]
    assert [len(group) for group in layer.groups(torch.randn(600, 5))] == [200] * 3
    assert not layer.groups(torch.randn(7, 5))
    assert [len(group) for group in layer.last_groups()] == [7]
    assert not layer.last_groups()
    layer.groups(torch.randn(3, 5))
    assert not layer.last_groups()  # three make no estimate, and no NaN either


def test_products_are_those_of_every_layer_however_they_are_held(monkeypatch):
    """Of equal and unlike shapes, in several groups, with samples that wait, and also if few or none fit the buffer."""
    widths, dtypes = [5, 5, 7, 7, 300, 5], [torch.float32] * 4 + [torch.float64, torch.bfloat16]
    rows = [torch.randn(300, width).add(100).to(dtype) for width, dtype in zip(widths, dtypes, strict=True)]
    for held in (2**26, 20_000, 0):
        monkeypatch.setattr("torchhook.compare.accumulators._HELD", held)
        layers, products = [LayerFeatures(LayerCall("x", 0), x) for x in rows], Products()
        for _ in range(2):  # the buffer is used again
            for layer, x in zip(layers, rows, strict=True):
                products.add(layer, layer.groups(x))
            grams = products.settle()
            for x, found in zip(rows, grams, strict=True):
                parts = [part.double() - part.double().mean(0) for part in x.tensor_split(2)]
                for part, gram in zip(parts, found, strict=True):
                    torch.testing.assert_close(gram.double(), part @ part.T, rtol=1e-4, atol=1e-4 * part.shape[1])
        assert [len(found) for found in products.settle()] == []
        for layer, x in zip(layers, rows, strict=True):
            torch.testing.assert_close(layer.origin, x[:150].double().mean(0), rtol=1e-5, atol=0)


def test_alignments_weigh_groups_by_their_pairs():
    x, y = torch.randn(60, 4).double(), torch.randn(60, 3).double()
    found = Alignments(1, 1, torch.device("cpu"))
    for part in (slice(0, 20), slice(20, 60)):
        found.add(*([[side[part] @ side[part].T]] for side in (x, y)))
    assert found.samples == 60
    expected = hsic(x[:20], y[:20]) + hsic(x[20:], y[20:])
    assert float(found.cross) == pytest.approx(float(expected), rel=1e-9)


def test_how_wide_exact_layers_are():
    assert exact_width([10, 20], [10, 20], 8 * (34 * 34 + 2 * (144 + 484))) == 20
    assert exact_width([10, 20], [10, 20], 8 * (34 * 34 + 2 * (144 + 484)) - 1) == 10
    assert exact_width([10, 20], [10, 20], 0) == 0


def test_products_are_precise_whatever_is_set_for_speed():
    x = torch.randn(64, 64)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with in_full(x.device):
                product = x @ x.T
                assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
            rough = x @ x.T
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"  # as it was
    finally:
        torch.set_float32_matmul_precision(before)
    assert product.dtype == torch.float32
    assert (product.double() - x.double() @ x.double().T).abs().max() < 1e-4
    assert rough.dtype == torch.bfloat16
