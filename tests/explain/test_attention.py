"""`explain.attention` on torch's own attention and on attention by hand, against weights that are known."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from specimens import hooks_of
from torchhook import BudgetError
from torchhook.core.attention import Given, Product
from torchhook.core.errors import NotRecordedError, SilentError
from torchhook.explain import attention_maps as attended
from torchhook.explain.attention_capture import attention
from torchhook.explain.attention_maps import summary_of

pytestmark = pytest.mark.usefixtures("one_thread")


class Own(nn.Module):
    """Attention as people write it, by one of torch's functions or by hand."""

    def __init__(self, width=16, heads=2, by_hand=False, **options):
        super().__init__()
        self.heads, self.by_hand, self.options = heads, by_hand, options
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.by_hand:
            weights = self.drop((q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1))
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, **self.options)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Calling(nn.Module):
    """Calls a function of its input, with a part that has weights."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.function(self, *args)


def same(one, other, atol=2e-6):
    torch.testing.assert_close(one, other, rtol=0, atol=atol)


# --- nn.MultiheadAttention

HIDDEN = torch.arange(35).view(5, 7) % 3 == 1
PADDING = torch.arange(21).view(3, 7) % 4 == 1
MASKS = {
    "plain": {},
    "boolean mask": {"attn_mask": HIDDEN},
    "float mask": {"attn_mask": torch.linspace(-2, 2, 35).view(5, 7)},
    "mask by head": {"attn_mask": torch.arange(6 * 35).view(6, 5, 7) % 4 == 1},
    "boolean padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(3, 7).masked_fill(PADDING, -math.inf)},
    "mask and padding": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
}
KINDS = {
    "one width": {},
    "own widths": {"kdim": 6, "vdim": 10},
    "a bias as a key": {"add_bias_kv": True},
    "a zero as a key": {"add_zero_attn": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("batch_first", [False, True], ids=["positions first", "batch first"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_multihead_attention(kind, masks, batch_first, train):
    options = KINDS[kind]
    layer = nn.MultiheadAttention(8, 2, batch_first=batch_first, **options).train(train)
    inputs = [torch.randn(3, n, w) for n, w in ((5, 8), (7, options.get("kdim", 8)), (7, options.get("vdim", 8)))]
    inputs = inputs if batch_first else [x.transpose(0, 1) for x in inputs]
    expected = layer(*inputs, **MASKS[masks], average_attn_weights=False)[1]
    model = Calling(lambda self, *x: self.mix(*x, **MASKS[masks], need_weights=False)[0], mix=layer)
    with torch.no_grad():
        plain = model(*inputs)
    seen = attention(model, tuple(inputs))
    same(seen.output, plain)
    assert seen.paths == ["mix"]
    same(seen["mix", 0].weights, expected.detach())
    assert not seen[0].entropy.isnan().any() and seen[0].distance.isnan().all()  # seven keys for five queries


@pytest.mark.parametrize("masks", MASKS)
def test_the_function_behind_it_takes_masks_as_they_are(masks):
    layer = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    q, k = torch.randn(5, 3, 8), torch.randn(7, 3, 8)

    def run(self, q, k):
        biases = self.mix.in_proj_bias, self.mix.bias_k, self.mix.bias_v
        weights = self.mix.out_proj.weight, self.mix.out_proj.bias
        return F.multi_head_attention_forward(
            q,
            k,
            k,
            8,
            2,
            self.mix.in_proj_weight,
            *biases,
            True,
            0.0,
            *weights,
            **MASKS[masks],
            average_attn_weights=False,
        )

    seen = attention(Calling(run, mix=layer), (q, k))
    assert seen[0].path == "" and seen[0].shape == (3, 2, 5, 9)
    same(seen[0].weights, seen.output[1])


def test_a_causal_hint_takes_the_place_of_its_mask():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(3, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected = layer(x, x, x, attn_mask=mask, average_attn_weights=False)[1]
    options = {"attn_mask": torch.zeros(5, 5), "is_causal": True, "need_weights": False}  # a hint that is wrong
    seen = attention(Calling(lambda self, x: self.mix(x, x, x, **options)[0], mix=layer), x)
    same(seen.output, layer(x, x, x, attn_mask=mask)[0].detach())  # torch believes it
    same(seen[0].weights, expected.detach())
    assert seen[0].entropy[:, :, 0].isnan().all() and not seen[0].entropy[:, :, 1:].isnan().any()


def test_keys_that_are_added_have_no_distance():
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True).eval(), torch.randn(3, 5, 8)
    seen = attention(Calling(lambda self, x: self.mix(x, x, x)[0], mix=layer), x)
    share = seen[0].weights[..., :5]
    gaps = (torch.arange(5)[:, None] - torch.arange(5)).abs()
    same(seen[0].distance, (share * gaps).sum(-1) / share.sum(-1))
    step = share.mean(1) + torch.eye(5)
    assert seen[0].added == 1
    same(seen.rollout(), step / step.sum(-1, keepdim=True))


@pytest.mark.parametrize("lead", [(3,), (3, 2), (3, 4, 2), (1, 1)])
@pytest.mark.parametrize("cut", [lambda w: w[..., :-2], lambda w: w[..., :-1][..., :-1], lambda w: w[..., :5] * 1.0])
def test_keys_that_are_cut_off_are_sinks(lead, cut):
    """Which GPT-OSS and others have: they take weight, and have no values."""

    def run(self, x):
        logits = torch.cat([x @ x.mT, torch.ones(*lead, 5, 2)], -1)
        return cut(logits.softmax(-1)) @ x

    seen = attention(Calling(run), torch.randn(*lead, 5, 8))
    weights = seen[0].weights
    assert seen[0].added == 2 and weights.shape[2:] == (5, 7) and not seen[0].distance.isnan().any()
    same(weights.sum(-1), torch.ones(weights.shape[:-1]))
    step = weights[..., :5].mean(1) + torch.eye(5)
    same(seen.rollout(), step / step.sum(-1, keepdim=True))


@pytest.mark.parametrize("cut", [lambda w: w[..., 1:], lambda w: w[..., [0, 1, 2, 3, 4]], lambda w: w[..., ::2]])
def test_keys_that_are_left_out_elsewhere_are_no_sinks(cut):
    def run(self, x):
        weights = cut((x @ x.mT).softmax(-1))
        return weights @ torch.ones(3, 2, weights.shape[-1], 8)

    seen = attention(Calling(run), torch.randn(3, 2, 6, 8))
    assert seen[0].added == 0 and seen[0].shape == (3, 2, 6, 6)


@pytest.mark.parametrize("padded", [False, True])
def test_encoders_leave_their_fast_path(padded):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    inputs = {"src": x}
    if padded:
        inputs["src_key_padding_mask"] = torch.arange(5) >= torch.tensor([[5], [4], [2]])
    expected = attention(model.train(), inputs)  # which has no fast path
    model.eval()
    before = hooks_of(model)
    with torch.no_grad():
        plain = model(**inputs)
    with pytest.warns(UserWarning, match="fast path"):
        seen = attention(model, inputs)
    assert hooks_of(model) == before
    assert seen.paths == expected.paths == ["layers.0.self_attn", "layers.1.self_attn"]
    real = torch.ones(3, 5, dtype=torch.bool) if not padded else ~inputs["src_key_padding_mask"]
    same(seen.output[real], plain[real])
    for one, other in zip(seen, expected, strict=True):
        same(one.weights, other.weights)
        assert torch.equal(one.entropy.isnan()[:, 0], ~real)
    with torch.no_grad():
        assert torch.equal(model(**inputs), plain)  # it is taken again


def test_a_decoder_looks_at_itself_and_at_its_memory():
    model = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    seen = attention(model, (torch.randn(3, 5, 8), torch.randn(3, 5, 8)))
    assert seen.paths == ["self_attn", "multihead_attn"]
    with pytest.raises(ValueError, match="an encoder and a decoder"):
        seen.rollout()


# --- plain calls


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("by_hand", [True, False])
def test_outputs_are_as_without_to_the_last_bit(by_hand, context, train):
    model = Own(by_hand=by_hand, **({} if by_hand else {"dropout_p": 0.5 * train})).train(train)
    x = torch.randn(3, 5, 16)
    before = hooks_of(model)
    with context():
        state = torch.get_rng_state()
        plain, after = model(x), torch.get_rng_state()
        torch.set_rng_state(state)
        seen = attention(model, x)
    assert torch.equal(seen.output, plain) and torch.equal(torch.get_rng_state(), after)
    assert hooks_of(model) == before and model.training == train and not _get_current_function_mode_stack()
    same(seen[0].weights.sum(-1), torch.ones(3, 2, 5))  # of before the dropout
    assert seen[0].path == "" and repr(seen[0]).startswith("attention of 'the model': 3×2×5×5, entropy 0.")


def test_by_hand_and_by_a_kernel_look_at_the_same():
    kernel, by_hand, x = Own().eval(), Own(by_hand=True).eval(), torch.randn(3, 5, 16)
    by_hand.load_state_dict(kernel.state_dict())
    one, other = attention(kernel, x), attention(by_hand, x)
    same(one[0].weights, other[0].weights)
    assert attention(by_hand, x, how="error")[0].shape == (3, 2, 5, 5)


def test_several_attentions_in_one_module_and_modules_that_are_called_again():
    def twice(self, x):
        x = self.mix(x)
        x = F.scaled_dot_product_attention(x, x, x)
        x = self.mix(x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    seen = attention(nn.Sequential(Calling(twice, mix=Own().eval())), torch.randn(3, 5, 16))
    assert [(call.path, call.call) for call in seen] == [("0.mix", 0), ("0", 0), ("0.mix", 1), ("0", 1)]
    assert seen.paths == ["0.mix", "0"] and seen["0", 1] is seen[3] and seen["0.mix"] == [seen[0], seen[2]]
    assert seen["0*"] == [seen[1], seen[3]] and seen["**"] == list(seen) and seen[-1] is seen[3]
    assert seen[1].shape == (3, 1, 5, 5)
    with pytest.raises(NotRecordedError, match="no attention was seen at 'mix', only at '0.mix', '0'"):
        seen["mix"]


def test_a_checkpoint_and_autocast():
    model = nn.Sequential(Own(), Calling(lambda self, x: checkpoint(self.mix, x, use_reentrant=False), mix=Own()))
    x = torch.randn(3, 5, 16, requires_grad=True)
    seen = attention(model, x)
    assert seen.paths == ["0", "1.mix"] and x.grad is None
    with torch.autocast("cpu", torch.bfloat16):
        rough = attention(model, x)
    assert rough[1].weights.dtype == torch.float32
    same(rough[1].weights, seen[1].weights, atol=0.02)
    q = torch.randn(3, 2, 5, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(Calling(lambda self, q: F.scaled_dot_product_attention(q, q, q)), q)[0].weights
    same(found, (q @ q.mT / 2).softmax(-1))  # more exact than the kernel


@pytest.mark.parametrize("lead", [(), (3,), (3, 2), (3, 4, 2)])
@pytest.mark.parametrize("mask", [None, (5, 7), "whole", "one a sample"])
def test_products_of_any_number_of_dimensions(lead, mask):
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 8)
    if mask is not None:
        shape = {"whole": (*lead, 5, 7), "one a sample": (*lead[:1], *[1] * (len(lead) - 1), 1, 7)}.get(mask, mask)
        mask = torch.rand(shape) < 0.7
        mask[..., 0] = True
    model = Calling(lambda self, q, k, v: F.scaled_dot_product_attention(q, k, v, mask))
    logits = q @ k.mT / math.sqrt(8)
    expected = (logits if mask is None else logits.masked_fill(~mask, -math.inf)).softmax(-1)
    found = attention(model, (q, k, v))[0].weights
    same(found.reshape(expected.shape), expected)
    assert found.shape[1] == (lead[-1] if len(lead) > 1 else 1)


def test_grouped_queries_and_a_scale():
    q, k = torch.randn(3, 6, 5, 4), torch.randn(3, 2, 5, 4)
    options = {"enable_gqa": True, "scale": 0.3, "is_causal": True}
    model = Calling(lambda self, q, k: F.scaled_dot_product_attention(q, k, k, **options))
    expected = q @ k.repeat_interleave(3, 1).mT * 0.3
    expected = expected.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -math.inf).softmax(-1)
    same(attention(model, (q, k))[0].weights, expected)


def test_what_is_overwritten_later_does_not_matter():
    def careless(self, x):
        mask = torch.zeros(5, 5)
        out = F.scaled_dot_product_attention(x, x, x, mask)
        mask.fill_(-math.inf)
        return out + x.zero_()

    x = torch.randn(3, 2, 5, 4)
    expected = (x @ x.mT / 2).softmax(-1)
    same(attention(Calling(careless), x)[0].weights, expected)


def softmax_in_place(self, q, k):
    weights = q @ k.mT
    torch.softmax(weights, -1, out=weights)
    return weights @ k


def logits_are_emptied(self, q, k):
    logits = q @ k.mT
    weights = logits.softmax(-1)
    logits.zero_()
    return weights @ k


def logits_of_one_place(self, q, k):
    place = torch.empty(*q.shape[:-1], k.shape[-2])
    weights = F.softmax(torch.matmul(q, k.mT, out=place), dim=-1)
    torch.matmul(k, q.mT, out=place)
    return torch.einsum("nhqk,nhkd->nhqd", weights, k)


@pytest.mark.parametrize("model", [softmax_in_place, logits_are_emptied, logits_of_one_place])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_logits_that_are_overwritten_before_the_product(model, context):
    with context():
        q, k = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
        expected, plain = (q @ k.mT).softmax(-1), model(None, q, k)
        seen = attention(Calling(model), (q, k))
    assert torch.equal(seen.output, plain) and len(seen) == 1
    same(seen[0].weights, expected)
    same(seen[0].received, expected.mean(2))


@pytest.mark.parametrize(
    "query, key, lead",
    [
        ((1, 4), (2, 4), (2, 4)),
        ((2, 1), (2, 4), (2, 4)),
        ((2, 4), (1, 1), (2, 4)),
        ((1, 1), (2, 4), (2, 4)),
        ((4,), (2, 4), (2, 4)),
        ((2, 4), (4,), (2, 4)),
        ((), (3,), (3, 1)),
        ((3, 1, 4), (1, 2, 4), (6, 4)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_queries_and_keys_are_broadcast_as_the_kernel_does(query, key, lead, masked):
    q, k = torch.randn(*query, 5, 8), torch.randn(*key, 5, 8)
    mask = torch.ones(5, 5, dtype=torch.bool).tril() if masked else None
    seen = attention(Calling(lambda self, q, k: F.scaled_dot_product_attention(q, k, k, mask)), (q, k))
    logits = q @ k.mT / math.sqrt(8)
    expected = (logits if mask is None else logits.masked_fill(~mask, -math.inf)).softmax(-1)
    assert seen[0].shape == seen[0].weights.shape == (*lead, 5, 5)
    assert seen[0].entropy.shape == (*lead, 5) and seen[0].received.shape == (*lead, 5)
    same(seen[0].weights.reshape(expected.shape), expected)


def test_grouped_queries_with_the_keys_of_one_sample():
    q, k = torch.randn(3, 6, 5, 4), torch.randn(1, 2, 5, 4)
    seen = attention(Calling(lambda self, q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)), (q, k))
    same(seen[0].weights, (q @ k.repeat_interleave(3, 1).mT / 2).softmax(-1))


# --- nothing seen, and what goes wrong


@pytest.mark.parametrize("model", [nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 3), nn.Softmax(-1))])
def test_a_model_without_attention(model):
    before = hooks_of(model)
    with pytest.raises(SilentError, match=f"no attention was seen in this {type(model).__name__}: it called neither"):
        attention(model, torch.randn(3, 5, 16))
    assert hooks_of(model) == before


def test_a_batch_without_samples_has_no_attention():
    with pytest.raises(SilentError, match="no attention was seen"):
        attention(Own(), torch.randn(0, 5, 16))


def test_all_is_as_before_after_an_exception():
    def fails(self, x):
        self.mix(x)
        raise RuntimeError("of the model")

    model = Calling(fails, mix=Own())
    before = hooks_of(model)
    with pytest.raises(RuntimeError, match="of the model"):
        attention(model, torch.randn(3, 5, 16))
    assert hooks_of(model) == before and not _get_current_function_mode_stack()


def test_others_hooks_and_gradients_stay():
    model, x = Own(), torch.randn(3, 5, 16)
    model(x).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    fired = []
    model.out.register_forward_hook(lambda *_: fired.append(1))
    before = hooks_of(model)
    attention(model, x)
    assert fired == [1] and hooks_of(model) == before
    assert all(torch.equal(p.grad, k) for p, k in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize(
    "options, error, said",
    [
        ({"how": "fast"}, ValueError, "how must be 'recompute', 'eager' or 'error', not 'fast'"),
        ({"max_bytes": 0}, ValueError, "max_bytes must be at least 1"),
        ({"max_bytes": "1 GB"}, TypeError, "max_bytes must be a whole number"),
        ({"grid": 7}, TypeError, r"grid must be \(rows, columns\)"),
        ({"grid": (0, 7)}, ValueError, "grid must be at least 1"),
        ({"sites": "mix"}, ValueError, "no module matches 'mix'"),
    ],
)
def test_bad_arguments(options, error, said):
    with pytest.raises(error, match=said):
        attention(Own(), torch.randn(3, 5, 16), **options)
    with pytest.raises(TypeError, match="model must be"):
        attention(torch.randn(3), torch.randn(3))


# --- bounded


class Largest(TorchDispatchMode):
    """The largest tensor that was computed."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


@pytest.mark.parametrize("chunk", [1, 100, 2 * 2 * 40 * 7])
def test_logits_are_never_more_than_a_bound(monkeypatch, chunk):
    model, x = Own(is_causal=True), torch.randn(2, 40, 16)
    whole = attention(model, x)
    monkeypatch.setattr(attended, "CHUNK", chunk)
    with Largest() as largest:
        parts = attention(model, x)
    assert largest.numel <= max(chunk, 2 * 40 * 3 * 16)  # of what the model computes itself
    for name in ("entropy", "distance", "received", "sink", "weights"):
        torch.testing.assert_close(getattr(parts[0], name), getattr(whole[0], name), equal_nan=True)
    same(parts.rollout(), whole.rollout())


def test_weights_are_made_when_they_are_read_from_what_is_smaller():
    model, x = nn.Sequential(*(Own(is_causal=True) for _ in range(3))), torch.randn(1, 200, 16)
    size = 2 * 200 * 16 * 4  # queries and keys
    seen = attention(model, x, max_bytes=3 * size)
    assert all(call.source is not None for call in seen)
    assert seen[0].rows(3, 5).shape == (1, 2, 2, 200) and seen[0].rows(199, 300).shape == (1, 2, 1, 200)
    with pytest.raises(BudgetError, match=r"take 312.5 KiB, more than max_bytes=76800; read those of some queries"):
        _ = seen[0].weights
    with pytest.raises(BudgetError, match="the rollout takes"):
        seen.rollout()
    with pytest.raises(BudgetError, match="were not kept"):
        _ = attention(model, x, max_bytes=3 * size - 1)[2].rows(0, 1)


def test_a_mask_of_several_layers_is_kept_once():
    mask = (torch.rand(3, 1, 5, 5) < 0.7) | torch.eye(5, dtype=torch.bool)
    layers = [Own(attn_mask=mask.clone().expand(-1, 2, -1, -1)) for _ in range(3)]
    one = 2 * 3 * 5 * 16 * 4  # queries and keys
    size = 3 * one + 3 * 5 * 5
    seen = attention(nn.Sequential(*layers), torch.randn(3, 5, 16), sites="", max_bytes=size)
    kept = [call.source.masks[0] for call in seen]
    assert kept[0] is kept[1] is kept[2] and kept[0].shape == (3, 1, 5, 5)
    assert all(bool(((call.weights > 0) == mask).all()) for call in seen)
    with pytest.raises(BudgetError):
        attention(nn.Sequential(*layers), torch.randn(3, 5, 16), sites="", max_bytes=size - 1)
    small = attention(nn.Sequential(*layers), torch.randn(3, 5, 16), max_bytes=one + 3 * 5 * 5 - 1)
    assert all(call.source is None for call in small)  # a mask that was not kept does not count as known


def test_no_weights_at_all():
    seen = attention(Own(), torch.randn(3, 5, 16), sites=[])
    assert seen[0].source is None and not seen[0].entropy.isnan().any()
    with pytest.raises(NotRecordedError, match="'the model' were not kept"):
        _ = seen[0].weights


# --- identities


def test_an_even_look_and_a_look_at_one():
    even = summary_of(Given(torch.zeros(2, 3, 4, 4)))
    same(even.entropy, torch.ones(2, 3, 4))
    same(even.received, torch.full((2, 3, 4), 0.25))
    same(even.sink, torch.full((2, 3), 0.25))
    same(even.distance[0, 0], torch.tensor([1.5, 1.0, 1.0, 1.5]))
    itself = summary_of(Given(100 * torch.eye(4).expand(2, 3, 4, 4)))
    same(itself.entropy, torch.zeros(2, 3, 4))
    same(itself.distance, torch.zeros(2, 3, 4))
    causal = summary_of(Product(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), 1.0, causal=True))
    same(causal.entropy[0, 0, 1:], torch.ones(3))
    same(causal.distance[0, 0, 1:], torch.tensor([0.5, 1.0, 1.5]))
    same(causal.sink, torch.tensor([[(1 / 2 + 1 / 3 + 1 / 4) / 3]]))  # of those that have a choice


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min, -1e4])
@pytest.mark.parametrize("by_hand", [True, False])
def test_keys_that_are_masked_by_a_low_number_are_not_seen(low, by_hand):
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    x, numbers = torch.randn(1, 1, 4, 3), torch.zeros(4, 4).masked_fill(~mask, low)
    kept = Given(x @ x.mT + 2 * numbers) if by_hand else Product(x, x, 1.0, (numbers,))
    found, expected = summary_of(kept), summary_of(Product(x, x, 1.0, (mask,)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_a_query_that_sees_nothing():
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    x = torch.randn(1, 1, 4, 3)
    seen = attention(Calling(lambda self, x: F.scaled_dot_product_attention(x, x, x, mask)), x)
    assert (seen[0].weights[0, 0, 2] == 0).all() and seen[0].entropy[0, 0].isnan().tolist() == [
        False,
        False,
        True,
        False,
    ]
    same(seen.rollout().sum(-1), torch.ones(1, 4))


def test_the_sink_is_the_first_key_that_is_not_padding():
    padding = torch.tensor([[True, True, False, False, False], [False] * 5])
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    seen = attention(Calling(lambda self, x: self.mix(x, x, x, key_padding_mask=padding)[0], mix=layer), x)
    weights = seen[0].weights
    same(seen[0].sink[0], weights[0, :, 2:, 2].mean(-1))
    same(seen[0].sink[1], weights[1, :, :, 0].mean(-1))
    assert torch.equal(seen[0].entropy.isnan()[:, 0], padding)
    same(seen[0].by_head()["sink"], seen[0].sink.mean(0))


def test_nan_is_not_hidden():
    logits = torch.randn(1, 1, 3, 3)
    logits[0, 0, 1, 1] = math.nan
    assert summary_of(Given(logits)).entropy[0, 0].isnan().tolist() == [False, True, False]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9))
def test_positions_in_another_order(seed, length):
    torch.manual_seed(seed)
    model, x, order = nn.Sequential(Own(), Own()).eval(), torch.randn(2, length, 16), torch.randperm(length)
    one, other = attention(model, x), attention(model, x[:, order])
    for a, b in zip(one, other, strict=True):
        same(b.weights, a.weights[:, :, order][..., order])
        same(b.entropy, a.entropy[:, :, order])
        same(b.received, a.received[..., order])
    same(other.rollout(), one.rollout()[:, order][..., order])


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
def test_rollout_is_the_product_of_the_layers(heads):
    seen = attention(nn.Sequential(Own(), Own(is_causal=True)).eval(), torch.randn(3, 5, 16))
    fuse = {"mean": lambda w: w.mean(1), "max": lambda w: w.amax(1), "min": lambda w: w.amin(1)}[heads]
    steps = []
    for call in seen:
        step = 0.5 * fuse(call.weights) + 0.5 * torch.eye(5)
        steps.append(step / step.sum(-1, keepdim=True))
    found = seen.rollout(heads=heads)
    same(found, steps[1] @ steps[0])
    same(found.sum(-1), torch.ones(3, 5))
    same(seen.rollout([seen[0]], heads=heads), steps[0])
    with pytest.raises(ValueError, match="calls is empty"):
        seen.rollout([])
    with pytest.raises(ValueError, match="heads must be"):
        seen.rollout(heads="median")


def test_the_rollout_of_those_that_look_at_themselves_is_the_identity():
    x = 100 * torch.eye(4)[None, None]
    seen = attention(Calling(lambda self, x: F.scaled_dot_product_attention(x, x, x)), x)
    same(seen.rollout(), torch.eye(4)[None])


# --- how it shows itself


def test_tables():
    model = nn.Sequential(Own(), Own(heads=4)).eval()
    seen = attention(model, torch.randn(3, 5, 16))
    rows = seen.table("list")
    assert [(row["path"], row["call"], row["head"]) for row in rows] == [
        *(("0", 0, head) for head in range(2)),
        *(("1", 0, head) for head in range(4)),
    ]
    assert rows[3]["entropy"] == pytest.approx(float(seen[1].entropy[:, 1].mean()), rel=1e-5)
    lines = repr(seen).splitlines()
    assert lines[0] == "2 attentions in 2 modules; entropy, distance and sink are means over heads"
    assert lines[1].split() == ["layer", "call", "shape", "entropy", "distance", "sink"]
    assert lines[3].split()[:3] == ["1", "0", "3×4×5×5"]


def test_names_are_escaped_and_figures_are_drawn():
    model = nn.ModuleDict({"<b>": Own()})
    seen = attention(Calling(lambda self, x: self.parts["<b>"](x), parts=model), torch.randn(3, 5, 16))
    assert "&lt;b&gt;" in seen._repr_html_() and "<b>" not in seen._repr_html_()
    figure = seen[0].figure(1, tokens=["a", "b", "c", "d", "e"])
    assert [text.get_text() for text in figure.axes[0].texts][:2] == ["head 0", "head 1"]
    assert len(seen.figure().axes[0].texts) == 2


# --- two moments of a training


def test_how_attention_changes_in_a_training():
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 2)
    x, padded = torch.randn(3, 5, 16), torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 3:] = True
    given = {"src": x, "src_key_padding_mask": padded}
    optimizer, moments, weights = torch.optim.SGD(model.parameters(), 0.3), [], []
    for _ in range(3):
        moments.append(attention(model, given))
        weights.append([call.weights for call in moments[-1]])
        optimizer.zero_grad()
        model(**given)[~padded][:, :3].sum().backward()
        optimizer.step()
    for later in (1, 2):
        rows = moments[0].change(moments[later]).rows
        assert [(row["path"], row["head"]) for row in rows] == [
            (f"layers.{layer}.self_attn", head) for layer in range(2) for head in range(2)
        ]
        for row in rows:
            layer, head = int(row["path"].split(".")[1]), row["head"]
            old, new = (weights[moment][layer][:, head][~padded].double() for moment in (0, later))
            keys = (~padded).sum(1)[:, None].expand(3, 5)[~padded].double()
            entropies = [-(one * one.clamp(min=1e-30).log()).sum(-1) / keys.log() for one in (old, new)]
            assert row["before"] == pytest.approx(float(entropies[0].mean()), abs=1e-5)
            assert row["after"] == pytest.approx(float(entropies[1].mean()), abs=1e-5)
            assert row["change"] == pytest.approx(float((entropies[1] - entropies[0]).mean()), abs=1e-5)
            assert row["moved"] == pytest.approx(float((new - old).clamp(min=0).sum(-1).mean()), abs=1e-5)
            assert row["moved"] > 1e-3


def test_changes_without_weights_and_of_other_inputs():
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    x = torch.randn(3, 5, 16)
    seen, bare = attention(model, x), attention(model, x, sites=[])
    assert [row["moved"] for row in seen.change(bare).rows] == [None, None]
    assert [(row["change"], row["moved"]) for row in seen.change(seen).rows] == [(0, 0), (0, 0)]
    change = seen.change(bare)
    assert change.table("list") == change.rows and "2 heads" in repr(change) and "<table>" in change._repr_html_()
    with pytest.raises(
        ValueError, match="other must be of the same model .* 3×2×5×5 at 'self_attn', call 0 and 3×2×4×4"
    ):
        seen.change(attention(model, x[:, :4]))
