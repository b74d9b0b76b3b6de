"""Headroom, saturation, attention and the distance of histograms against exact oracles; and attention that is seen."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from contents import FLOATS, KINDS, SEEDS, filled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from torchhook import Histogram
from torchhook.rules.attention import GuardedAttending
from torchhook.stats import Attention, Headroom, Saturation
from torchhook.stats.stat import UnlikeError

NARROW = [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]


def merged(stat, parts):
    """What a statistic says of parts that were looked at one by one, and merged."""
    states = []
    for part in parts:
        state = stat.empty(part)
        stat.update(state, part)
        states.append(state)
    return stat.compute(stat.merge(torch.stack(states)))


def cut(x, dice, dim=0):
    """`x` in a few parts, some of them without anything."""
    edges = sorted(dice.randint(0, x.shape[dim]) for _ in range(3))
    sizes = [edges[0], edges[1] - edges[0], edges[2] - edges[1], x.shape[dim] - edges[2]]
    return x.split(sizes, dim)


DICE = st.randoms(use_true_random=False)


# --- headroom


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NARROW), KINDS, st.integers(1, 500), SEEDS, DICE)
def test_headroom_is_the_largest_finite_value_over_what_the_dtype_holds(dtype, kind, size, seed, dice):
    x = filled(kind, torch.float64, size, seed).to(dtype)
    values = x.double()
    known = values[values.isfinite()]
    expected = float(known.abs().max()) / torch.finfo(dtype).max if len(known) else 0.0
    assert Headroom().of(x) == expected
    assert merged(Headroom(), cut(x, dice)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_what_does_not_end_in_practice_has_all_headroom(dtype):
    assert Headroom().of(torch.full((3,), 100).to(dtype)) == 0


def test_the_largest_float16_uses_all_headroom_and_infinity_none():
    assert Headroom().of(torch.tensor([-65_504.0], dtype=torch.float16)) == 1
    assert Headroom().of(torch.tensor([math.inf, math.nan, 0.0], dtype=torch.float16)) == 0


# --- saturation


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([nn.Sigmoid, nn.Tanh]), st.integers(1, 40), st.integers(1, 6), SEEDS, DICE)
def test_saturation_is_the_part_at_the_ends_by_unit(kind, samples, units, seed, dice):
    torch.manual_seed(seed)
    x = kind()(4 * torch.randn(samples, units))
    low, high = (0.02, 0.98) if kind is nn.Sigmoid else (-0.97, 0.97)
    expected = ((x < low) | (x > high)).double().mean(0)
    stat = Saturation(dim=1).bound(kind())
    assert torch.equal(stat.of(x), expected)
    torch.testing.assert_close(merged(stat, cut(x, dice)), expected, rtol=1e-12, atol=0)


def test_the_units_of_a_picture_are_its_channels():
    x = torch.zeros(2, 3, 4, 4)
    x[:, 1] = 1
    assert Saturation().bound(nn.Tanh()).of(x).tolist() == [0, 1, 0]


@pytest.mark.parametrize("module", [None, nn.ReLU(), nn.GELU(), nn.Linear(3, 3)], ids=str)
def test_what_is_no_sigmoid_and_no_tanh_has_no_ends(module):
    assert Saturation(dim=1).bound(module).of(torch.tensor([[100.0, -100.0, 0.5]])).tolist() == [0, 0, 0]


# --- the entropy of attention


def entropy_by_hand(logits, unseen=-1e4):
    """The mean over positions of the entropy, in parts of the largest possible; by head."""
    found = []
    for head in range(logits.shape[1]):
        values = []
        for row in logits[:, head].reshape(-1, logits.shape[-1]).double():
            seen = row[row > unseen]
            if len(seen) > 1:
                share = (seen - seen.max()).exp()
                share = share / share.sum()
                values.append(-sum(p * math.log(p) for p in share.tolist() if p > 0) / math.log(len(seen)))
        found.append(sum(values) / len(values) if values else math.nan)
    return found


@st.composite
def attention_logits(draw):
    """Logits of every kind of mask, samples × heads × positions × keys."""
    shape = [draw(st.integers(1, high)) for high in (3, 3, 4, 5)]
    torch.manual_seed(draw(SEEDS))
    logits = draw(st.sampled_from([0.0, 0.1, 3.0, 50.0])) * torch.randn(shape)
    mask = torch.rand(shape) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
    hidden = draw(st.sampled_from([-math.inf, torch.finfo(torch.float32).min, -1e9]))
    return logits.masked_fill(mask, hidden).to(draw(st.sampled_from(FLOATS)))


@settings(max_examples=60, deadline=None)
@given(attention_logits(), DICE)
def test_the_entropy_and_the_largest_logit_are_those_by_hand(logits, dice):
    said = Attention().of(logits)
    torch.testing.assert_close(
        said.entropy, torch.tensor(entropy_by_hand(logits), dtype=torch.float64), rtol=1e-4, atol=1e-4, equal_nan=True
    )
    seen = logits[logits.double() > -1e4].double()
    assert said.largest == (float(seen.abs().max()) if len(seen) else 0)
    again = merged(Attention(), [part for part in cut(logits, dice) if len(part)])
    torch.testing.assert_close(again.entropy, said.entropy, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert again.largest == said.largest


def test_an_even_look_is_one_and_a_look_at_one_key_is_zero():
    logits = torch.zeros(2, 2, 3, 4)
    logits[:, 1, :, 2] = 1e3
    said = Attention().of(logits)
    torch.testing.assert_close(said.entropy, torch.tensor([1.0, 0.0], dtype=torch.float64), rtol=0, atol=1e-6)
    assert said.largest == 1e3


def test_other_numbers_of_dimensions_are_one_head_or_more_samples():
    logits = torch.randn(3, 2, 4, 5)
    flat, deep = Attention().of(logits.flatten(0, 1)), Attention().of(logits[:, None])
    torch.testing.assert_close(deep.entropy, Attention().of(logits).entropy)
    torch.testing.assert_close(flat.entropy, Attention().of(logits).entropy.mean(0, keepdim=True))


def test_calls_of_different_head_counts_do_not_belong_together():
    state = Attention().empty(torch.zeros(1, 2, 3, 3))
    with pytest.raises(UnlikeError, match="there were 2 heads, and now there are 4"):
        Attention().update(state, torch.zeros(1, 4, 3, 3))


# --- the distance of histograms


def wasserstein(a, b):
    """The distance of two samples, exactly: the area between their distributions."""
    a, b = a.double().sort().values, b.double().sort().values
    values = torch.cat([a, b]).sort().values
    below = [torch.searchsorted(x, values[:-1], right=True).double() / len(x) for x in (a, b)]
    return float(((below[0] - below[1]).abs() * values.diff()).sum())


SCALES = st.sampled_from([1e-3, 1.0, 7.0, 1e4])


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 300), st.integers(1, 300), SCALES, st.floats(-3, 3), st.booleans())
def test_the_distance_is_wassersteins_up_to_the_width_of_bins(seed, n, m, scale, shift, rectified):
    torch.manual_seed(seed)
    a, b = torch.randn(n), scale * torch.randn(m) + shift
    if rectified:
        a, b = a.relu(), b.relu()
    found = Histogram().of(a).distance(Histogram().of(b))
    width = 0.25 * (float(a.abs().mean()) + float(b.abs().mean()))  # a bin is at most a quarter of its values wide
    assert abs(found - wasserstein(a, b)) <= 1.25 * width + 1e-30


def mixed(size):
    return torch.cat([torch.randn(size) - 3, 0.2 * torch.randn(size) + 2])


@pytest.mark.parametrize(
    "a, b",
    [
        (lambda: torch.randn(20_000), lambda: torch.randn(20_000) + 0.5),
        (lambda: torch.randn(20_000), lambda: 2 * torch.randn(10_000)),
        (lambda: torch.randn(20_000).relu(), lambda: (torch.randn(20_000) + 1).relu()),
        (lambda: torch.randn(20_000).exp(), lambda: (1.5 * torch.randn(20_000)).exp()),
        (lambda: mixed(10_000), lambda: torch.randn(20_000)),
        (lambda: 1e-6 * torch.rand(5_000), lambda: 1e-6 * torch.rand(5_000).sqrt()),
    ],
)
def test_the_distance_of_many_values_is_near_the_exact_one(a, b):
    a, b = a(), b()
    exact = wasserstein(a, b)
    assert Histogram().of(a).distance(Histogram().of(b)) == pytest.approx(exact, rel=0.03, abs=0.01 * float(a.std()))


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 200), st.integers(1, 200), st.integers(-20, 20))
def test_the_distance_is_a_distance_and_scales(seed, n, m, octaves):
    torch.manual_seed(seed)
    x, y = torch.randn(n), 3 * torch.randn(m) - 1
    a, b = Histogram().of(x), Histogram().of(y)
    assert a.distance(a) == 0 and a.distance(b) >= 0
    assert a.distance(b) == pytest.approx(b.distance(a), rel=1e-12)
    scaled = Histogram().of(x * 2.0**octaves).distance(Histogram().of(y * 2.0**octaves))
    assert scaled == pytest.approx(a.distance(b) * 2.0**octaves, rel=1e-9)


def test_one_value_a_bin_apart():
    ones, twos = Histogram().of(torch.full((5,), 1.0)), Histogram().of(torch.full((9,), 2.0))
    assert ones.distance(twos) == pytest.approx(1, abs=0.25)
    assert ones.distance(Histogram().of(torch.full((3,), 1.0))) == 0
    assert ones.distance(Histogram().of(torch.full((5,), -1.0))) == pytest.approx(2, abs=0.5)


def test_what_is_not_finite_has_no_distance():
    some, none = Histogram().of(torch.tensor([1.0, math.nan])), Histogram().of(torch.tensor([math.nan, math.inf]))
    assert math.isnan(some.distance(none)) and math.isnan(none.distance(some))
    assert some.distance(Histogram().of(torch.tensor([1.0]))) == 0


# --- attention as it is computed


def told(function):
    """The logits that are seen while a function runs, and what that gives, which is the same without."""
    seen = []
    state = torch.get_rng_state()
    expected = function()
    torch.set_rng_state(state)
    with GuardedAttending(seen.append):
        found = function()
    for one, other in zip(_tensors(found), _tensors(expected), strict=True):
        assert torch.equal(one, other)
    return seen, found


def _tensors(value):
    return [value] if isinstance(value, torch.Tensor) else [one for one in value if one is not None]


def qkv(heads=2, queries=5, keys=7, width=4, key_heads=None):
    sizes = (heads, queries), (key_heads or heads, keys), (key_heads or heads, keys)
    return [torch.randn(3, each, length, width) for each, length in sizes]


PRODUCTS = {
    "plain": {},
    "boolean mask": {"attn_mask": torch.arange(35).view(5, 7) % 3 != 1},
    "boolean mask by head": {"attn_mask": (torch.arange(3 * 2 * 35) % 4 != 1).view(3, 2, 5, 7)},
    "float mask": {"attn_mask": torch.linspace(-2, 2, 35).view(5, 7)},
    "float mask with -inf": {
        "attn_mask": torch.zeros(5, 7).masked_fill(torch.arange(35).view(5, 7) % 3 == 1, -math.inf)
    },
    "causal": {"is_causal": True},
    "scale": {"scale": 0.7},
    "causal and scale": {"is_causal": True, "scale": 0.1},
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_logits_of_products_are_those_that_give_the_output(name, dtype):
    query, key, value = (x.to(dtype) for x in qkv())
    options = dict(PRODUCTS[name])
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].to(dtype)
    (logits,), output = told(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    assert logits.shape == (3, 2, 5, 7)
    rough = dtype == torch.bfloat16
    torch.testing.assert_close(
        logits.double().softmax(-1) @ value.double(), output.double(), rtol=0, atol=0.03 if rough else 1e-5
    )


@pytest.mark.parametrize("options", PRODUCTS.values(), ids=PRODUCTS)
def test_logits_of_products_are_those_by_hand(options):
    query, key, value = qkv()
    (logits,), _ = told(lambda: F.scaled_dot_product_attention(query, key, value, **options))
    for sample in range(3):
        for head in range(2):
            for position in range(5):
                for number in range(7):
                    product = float(query[sample, head, position] @ key[sample, head, number])
                    expected = product * options.get("scale", 0.5)  # of a width of four
                    if options.get("is_causal") and number > position:
                        expected = -math.inf
                    if (mask := options.get("attn_mask")) is not None:
                        at = mask.expand(3, 2, 5, 7)[sample, head, position, number]
                        expected = expected + float(at) if at.is_floating_point() else expected if at else -math.inf
                    found = float(logits[sample, head, position, number])
                    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_logits_of_grouped_queries():
    query, key, value = qkv(heads=6, key_heads=2)
    with sdpa_kernel(SDPBackend.MATH):
        (logits,), output = told(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    assert logits.shape == (3, 6, 5, 7)
    spread = value.repeat_interleave(3, 1)
    torch.testing.assert_close(logits.softmax(-1) @ spread, output, rtol=0, atol=1e-5)


def test_products_of_three_dimensions_and_positional_arguments():
    query, key, value = (x[:, 0] for x in qkv())
    mask = torch.arange(35).view(5, 7) % 3 != 1
    (logits,), output = told(lambda: F.scaled_dot_product_attention(query, key, value, mask, 0.0, False))
    assert logits.shape == (3, 1, 5, 7)
    torch.testing.assert_close(logits.softmax(-1)[:, 0] @ value, output, rtol=0, atol=1e-5)


def test_dropout_and_gradients_are_as_without():
    query, key, value = (x.requires_grad_() for x in qkv())

    def run():
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
        return output, *torch.autograd.grad(output.sum(), [query, key, value])

    (logits,), _ = told(run)
    assert logits.shape == (3, 2, 5, 7)


HIDDEN = torch.arange(35).view(5, 7) % 3 == 1
PADDING = torch.arange(21).view(3, 7) % 4 == 1
MULTIHEAD = {
    "plain": {},
    "boolean mask": {"attn_mask": HIDDEN},
    "float mask": {"attn_mask": torch.linspace(-2, 2, 35).view(5, 7)},
    "mask by head": {"attn_mask": (torch.arange(6 * 35).view(6, 5, 7) % 4 == 1)},
    "boolean padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(3, 7).masked_fill(PADDING, -math.inf)},
    "soft padding": {"key_padding_mask": torch.linspace(-2, 2, 21).view(3, 7)},
    "mask and padding": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
}
LAYERS = {
    "one width": {},
    "without biases": {"bias": False},
    "own widths": {"kdim": 6, "vdim": 10},
}


@pytest.mark.parametrize("batch_first", [False, True], ids=["positions first", "batch first"])
@pytest.mark.parametrize("masks", MULTIHEAD)
@pytest.mark.parametrize("layer", LAYERS)
def test_logits_of_multihead_attention_are_those_that_give_its_weights(layer, masks, batch_first):
    options = LAYERS[layer]
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options)
    inputs = [torch.randn(3, n, w) for n, w in ((5, 8), (7, options.get("kdim", 8)), (7, options.get("vdim", 8)))]
    inputs = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
    (logits,), (_, weights) = told(lambda: attention(*inputs, **MULTIHEAD[masks], average_attn_weights=False))
    torch.testing.assert_close(logits.softmax(-1), weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_logits_of_multihead_attention_have_its_additional_key(option):
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True, **{option: True}), torch.randn(3, 5, 8)
    (logits,), (_, weights) = told(lambda: attention(x, x, x, average_attn_weights=False))
    torch.testing.assert_close(logits.softmax(-1), weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("masks", ["plain", "boolean mask", "mask and padding"])
def test_multihead_attention_without_weights_and_without_a_batch(masks):
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    options = dict(MULTIHEAD[masks])
    options |= {"key_padding_mask": options["key_padding_mask"][0]} if "key_padding_mask" in options else {}
    query, key = torch.randn(5, 8), torch.randn(7, 8)
    (logits,), _ = told(lambda: attention(query, key, key, **options, need_weights=False))
    _, weights = attention(query, key, key, **options, average_attn_weights=False)
    assert logits.shape == (1, 2, 5, 7)
    torch.testing.assert_close(logits.softmax(-1)[0], weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "softmax",
    [
        lambda x: F.softmax(x, -1),
        lambda x: F.softmax(x, dim=3),
        lambda x: torch.softmax(x, dim=-1),
        lambda x: x.softmax(-1),
        lambda x: x.softmax(dim=-1, dtype=torch.float32),
        nn.Softmax(dim=-1),
    ],
)
def test_a_softmax_over_keys_is_seen_when_it_meets_values(softmax):
    logits, value = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    (found,), _ = told(lambda: softmax(logits) @ value)
    assert torch.equal(found, logits)


WEIGHED = {
    "matmul": lambda w, v: torch.matmul(w, v),
    "bmm": lambda w, v: torch.bmm(w.flatten(0, 1), v.flatten(0, 1)),
    "einsum": lambda w, v: torch.einsum("bhqk,bhkd->bqhd", w, v),
    "einsum of a list": lambda w, v: torch.einsum("bhqk,bhkd->bqhd", [w, v]),
    "values first": lambda w, v: v.mT @ w.mT,
    "dropout": lambda w, v: F.dropout(w, 0.5) @ v,
    "another dtype": lambda w, v: w.to(torch.bfloat16) @ v.bfloat16(),
    "a mask of heads": lambda w, v: (w * torch.tensor([1.0, 0, 1]).view(1, 3, 1, 1)) @ v,
    "a masked fill": lambda w, v: w.masked_fill(w < 0.1, 0.0) @ v,
    "where": lambda w, v: torch.where(w < 0.1, 0.0, w) @ v,
    "a key that is left out": lambda w, v: w[..., :-1] @ v[..., :-1, :],
}


@pytest.mark.parametrize("weighed", WEIGHED.values(), ids=WEIGHED)
def test_weights_are_known_whatever_is_done_to_them_before_the_values(weighed):
    logits, value = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    (found,), _ = told(lambda: weighed(logits.softmax(-1), value))
    assert torch.equal(found, logits)


def test_a_softmax_of_three_dimensions_has_one_head():
    logits, value = torch.randn(2, 4, 5), torch.randn(2, 5, 6)
    (found,), _ = told(lambda: logits.softmax(-1) @ value)
    assert torch.equal(found, logits[:, None])


NO_ATTENTION = {
    "a classifier": lambda x, v: x.softmax(-1),
    "a classifier of two dimensions": lambda x, v: x[0, 0].softmax(-1) @ v[0, 0],
    "a router": lambda x, v: x.softmax(-1).topk(2, -1).values,
    "soft embeddings": lambda x, v: F.linear(x.softmax(-1), torch.ones(6, 5)),
    "the mean of a distribution": lambda x, v: x.softmax(3).matmul(torch.arange(5.0)),
    "a soft argmax": lambda x, v: x.softmax(-1) @ torch.ones(5, 2),
    "a product with itself alone": lambda x, v: torch.einsum("bhqk->bhq", x.softmax(-1)),
    "over heads": lambda x, v: x.softmax(1) @ v,
    "over queries": lambda x, v: x.softmax(-2) @ v,
    "a product without a softmax": lambda x, v: x @ v,
    "another product": lambda x, v: [x.softmax(-1), x @ v],
}


@pytest.mark.parametrize("function", NO_ATTENTION.values(), ids=NO_ATTENTION)
def test_what_is_no_attention_is_not_seen(function):
    logits, value = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    assert told(lambda: function(logits, value))[0] == []


def test_weights_that_meet_values_twice_are_told_once():
    logits, value = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)

    def run():
        weights = logits.softmax(-1)
        return weights @ value, weights @ value

    assert len(told(run)[0]) == 1


@pytest.mark.parametrize("backward", [torch.Tensor.backward, torch.autograd.backward])
@pytest.mark.parametrize("reentrant", [False, True])
def test_nothing_is_seen_a_second_time_in_a_backward_and_nothing_afterwards(reentrant, backward):
    query, key, value = (x.requires_grad_() for x in qkv())
    seen = []
    with GuardedAttending(seen.append):
        output = checkpoint(F.scaled_dot_product_attention, query, key, value, use_reentrant=reentrant)
        backward(output.sum())
    assert len(seen) == 1 and query.grad is not None
    F.scaled_dot_product_attention(query, key, value)
    assert len(seen) == 1


@pytest.mark.parametrize("train", [True, False])
def test_a_transformer_computes_the_same(train):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(train), torch.randn(3, 5, 8)

    def run():
        output = model(x)
        return output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))

    seen, _ = told(run)
    assert [logits.shape for logits in seen] == [(3, 2, 5, 5)] * 2


def test_a_fast_path_is_left_and_computes_the_same_up_to_rounding():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x, seen = torch.randn(3, 5, 8), []
    with torch.no_grad():
        expected = layer(x)
        with GuardedAttending(seen.append):
            found = layer(x)
    assert len(seen) == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_what_cannot_be_looked_at_is_told_and_not_disturbed():
    x = torch.nested.nested_tensor([torch.randn(4, 2, 8), torch.randn(6, 2, 8)], layout=torch.jagged)
    query = x.transpose(1, 2)
    expected = F.scaled_dot_product_attention(query, query, query)
    with GuardedAttending(lambda logits: None), pytest.warns(UserWarning, match="could not measure"):
        found = F.scaled_dot_product_attention(query, query, query)
    assert all(torch.equal(a, b) for a, b in zip(found.unbind(), expected.unbind(), strict=True))


def test_a_fault_of_ours_stops_nothing(monkeypatch):
    logits, value = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 5, 6)
    attending = GuardedAttending(lambda logits: None)
    monkeypatch.setattr(attending, "_open", None)  # which cannot be looked into
    with attending, pytest.warns(UserWarning, match="could not measure the attention of softmax") as caught:
        found = logits.softmax(-1) @ value
    assert torch.equal(found, logits.softmax(-1) @ value)
    assert caught[0].filename == __file__


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_gpt_computes_the_same(implementation):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 16}
    model = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation=implementation))
    ids = torch.randint(40, (3, 7))
    seen, _ = told(lambda: [model(ids, labels=ids).loss])
    assert [logits.shape for logits in seen] == [(3, 2, 7, 7)] * 2
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert all(bool((logits[:, :, future] < -1e4).all()) for logits in seen)
    assert all(bool((logits[:, :, ~future] > -1e4).all()) for logits in seen)
