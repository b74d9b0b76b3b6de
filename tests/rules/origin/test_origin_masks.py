"""-Inf is legal in masks: it raises nothing by itself, and is not the origin of a NaN."""

import pytest
import torch
import torch.nn.functional as F
from sick_models import Attention, Calls, Divide, Log, line_of, linear
from torch import nn

from torchhook.origins import Catch
from torchhook.rules.origin import search

INF = float("inf")


def caught(model, run):
    with Catch(model, None, "record") as catch:
        run()
    return catch


def causal(width):
    return torch.full((width, width), -INF).triu(1)


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", causal(5))

    def forward(self, x):
        return (x @ x.transpose(-1, -2) + self.mask).softmax(-1) @ x


MASKS = {
    "an argument": (Calls(lambda self, x, mask: (x @ x.mT + mask).softmax(-1) @ x), (causal(5),)),
    "a buffer": (WithBuffer(), ()),
    "masked_fill": (Attention(), (causal(5) < 0,)),
    "sdpa": (Calls(lambda self, x, mask: F.scaled_dot_product_attention(x, x, x, attn_mask=mask)), (causal(5),)),
    "encoder": (nn.TransformerEncoderLayer(4, 2, batch_first=True), (causal(5),)),
    "attention": (nn.MultiheadAttention(4, 2, batch_first=True), None),
}


@pytest.mark.parametrize("model, more", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("training", [True, False])
def test_attention_masks_are_legal(model, more, training):
    x = torch.randn(2, 5, 4, requires_grad=True)

    def run():
        out = model(x, x, x, attn_mask=causal(5))[0] if more is None else model(x, *more)
        out.sum().backward()

    assert caught(model.train(training), run).finding is None


MADE = {
    "masked_fill": lambda x, m: x.masked_fill(m, -INF),
    "masked_fill_": lambda x, m: x.clone().masked_fill_(m, -INF),
    "masked_fill with a tensor": lambda x, m: x.masked_fill(m, torch.tensor(-INF)),
    "where": lambda x, m: torch.where(m, -INF, x),
    "where with full_like": lambda x, m: torch.where(m, torch.full_like(x, -INF), x),
    "assignment": lambda x, m: x.clone().index_put_((m,), torch.tensor(-INF)),
    "added": lambda x, m: x + torch.zeros_like(x).masked_fill(m, -INF),
    "scatter": lambda x, m: x.scatter(1, torch.zeros(len(x), 1, dtype=torch.long), -INF),
    "pad": lambda x, m: F.pad(x, (0, 2), value=-INF),
    "max of nothing": lambda x, m: F.max_pool1d(F.pad(x, (0, 4), value=-INF), 2),
}


@pytest.mark.parametrize("mask", MADE.values(), ids=MADE)
def test_masked_logits_are_a_legal_output(mask, monkeypatch):
    model = Calls(
        lambda self, x, m: self.mask(self.logits(x), m), logits=linear(), mask=Calls(lambda self, x, m: mask(x, m))
    )
    m = torch.eye(3, 4, dtype=torch.bool)
    replays = []
    replay_call = search.replay_call
    monkeypatch.setattr(search, "replay_call", lambda *a, **k: replays.append(a) or replay_call(*a, **k))

    def run():
        for _ in range(4):
            assert model(torch.randn(3, 4), m).isneginf().any()

    assert caught(model, run).finding is None
    assert len(replays) == 1  # replayed once, not in every pass


def test_an_output_that_computed_minus_infinity_is_not():
    model = nn.Sequential(linear(), nn.ReLU(), Log(), nn.Identity())
    origin = caught(model, lambda: model(torch.zeros(1, 4))).origin
    assert (origin.path, origin.op, origin.what) == ("2", "aten.log", "-Inf")


def test_a_log_of_zero_that_is_masked_later_is_legal_also_beside_masks_that_stay():
    def forward(self, x, m):
        safe = torch.where(x > 0, self.log(x), 0.0)
        return self.last(safe).masked_fill(m, -INF)

    model = Calls(forward, log=Log(), last=linear())
    m = torch.eye(3, 4, dtype=torch.bool)
    assert caught(model, lambda: model(torch.zeros(3, 4), m)).finding is None

    def broken(self, x, m):
        return self.sick(forward(self, x, m).masked_fill(m, 1.0))

    model = Calls(broken, log=Log(), last=linear(), sick=Divide())
    assert caught(model, lambda: model(torch.zeros(3, 4), m)).origin.path == "sick"


def test_a_row_that_is_all_masked_is_the_softmax_s_fault():
    model = Calls(
        lambda self, x, m: self.out(self.attention(self.qkv(x), m)), qkv=linear(), attention=Attention(), out=linear()
    )
    m = torch.eye(3, dtype=torch.bool)
    assert caught(model, lambda: model(torch.randn(3, 4), m)).finding is None
    m[1] = True
    catch = caught(model, lambda: model(torch.randn(3, 4), m))
    assert (catch.origin.path, catch.origin.op) == ("attention", "aten._softmax")
    assert catch.origin.line == line_of(Attention, "softmax") and catch.origin.operands[0].low == -INF
    assert "mask" in catch.finding.hint


@pytest.mark.parametrize(
    "later", [lambda x: x * 0, lambda x: x - x, lambda x: x.softmax(0)], ids=["times 0", "minus", "softmax"]
)
def test_nan_from_a_computed_minus_infinity_began_there(later):
    model = nn.Sequential(linear(), nn.ReLU(), Log(), nn.Identity(), Calls(lambda self, x: later(x)), linear())
    origin = caught(model, lambda: model(torch.zeros(2, 4))).origin
    assert (origin.path, origin.op, origin.line) == ("2", "aten.log", line_of(Log, "log"))


def test_a_mask_beside_a_computed_minus_infinity_that_has_nothing_to_do_with_it():
    def forward(self, x, m):
        self.log(x)  # -Inf that is not used
        return self.attention(x, m)

    model = Calls(forward, log=Log(), attention=Attention())
    origin = caught(model, lambda: model(torch.zeros(3, 4), torch.ones(3, 3, dtype=torch.bool))).origin
    assert (origin.path, origin.op) == ("attention", "aten._softmax")


def test_a_mask_that_is_multiplied_is_the_product_s_fault():
    def forward(self, x, keep):
        return self.last((x + (1 - keep) * -INF).softmax(-1))  # product

    model = Calls(forward, last=linear())
    origin = caught(model, lambda: model(torch.zeros(2, 4), torch.ones(2, 4))).origin
    assert (origin.op, origin.line) == ("aten.mul", line_of(forward, "product"))
