"""`compare.leakage`: gradient norms against vmap, AUCs against scikit-learn, digits that are told, and inverted."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score, roc_curve
from torch import nn
from torch.func import functional_call, grad, vmap

from specimens import hooks_of
from torchhook.compare.auc import auc_of, true_positives
from torchhook.compare.membership import leakage
from torchhook.compare.sample_gradients import backward
from torchhook.core.batch import Batch

pytestmark = pytest.mark.usefixtures("one_thread")


class Twice(nn.Module):
    """Calls one convolution and one linear layer twice, the latter on sequences."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc, self.head = nn.Conv1d(4, 4, 3, padding=1), nn.Linear(5, 5), nn.Linear(20, 3)

    def forward(self, x):
        x = torch.tanh(self.conv(torch.tanh(self.conv(x))))
        return self.head(torch.relu(self.fc(torch.relu(self.fc(x)))).flatten(1))


MODELS = {
    "vectors": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3, bias=False)), (6,)),
    "sequences": (lambda: nn.Sequential(nn.Linear(6, 2), nn.GELU(), nn.Flatten(), nn.Linear(10, 3)), (5, 6)),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(6, 6, (1, 3), dilation=(1, 2), padding="same", padding_mode="circular", bias=False),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(6 * 16, 3),
        ),
        (4, 8, 8),
    ),
    "large": (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 18 * 18, 3)), (1, 20, 20)),
    "volumes": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2, stride=2), nn.Flatten(), nn.Linear(24, 3)), (2, 4, 4, 4)),
    "calls": (Twice, (4, 5)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_norms_of_each_samples_gradient_from_one_backward(kind):
    make, shape = MODELS[kind]
    model = make().double()
    x, y = torch.randn(7, *shape, dtype=torch.float64), torch.randint(0, 3, (7,))

    def loss(parameters, sample, target):
        return F.cross_entropy(functional_call(model, parameters, sample[None]), target[None])

    each = vmap(grad(loss), in_dims=(None, 0, 0))(dict(model.named_parameters()), x, y)
    expected = sum(g.flatten(1).square().sum(1) for g in each.values())
    found = backward(model, Batch.of((x, y)), lambda output, target: F.cross_entropy(output, target, reduction="none"))
    squares = sum(flow.squares(7) for flow in found.flows.values())
    torch.testing.assert_close(squares, expected.detach(), rtol=1e-10, atol=1e-14)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class SequenceFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.fc(x.transpose(0, 1)).mean(0))


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 4, 1)
        self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.up(x.transpose(1, 2)).transpose(1, 2)
        return self.out(self.attention(x, x, x)[0].mean(1))


class Uncalled(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))
        self.unused = nn.Linear(4, 4)

    def forward(self, x):
        return self[0](x)


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(input=torch.tanh(self.fc(input=x)))


NORMS = {
    "tied": (Tied, (4,), {"'a'": "weight is also used elsewhere", "'b'": "weight is also used elsewhere"}),
    "sequence first": (SequenceFirst, (8, 4), {"'fc'": "do not have one row per sample"}),
    "attention": (Attentive, (6, 4), {}),
    "uncalled": (Uncalled, (4,), {"'unused'": "it was not called in every batch"}),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Linear(5, 3)),
        (4,),
        {"'0'": "computed from other parameters"},
    ),
    "frozen": (
        lambda: nn.Sequential(nn.Linear(4, 5).requires_grad_(False), nn.ReLU(), nn.Linear(5, 3)),
        (4,),
        {"'0'": "it is frozen"},
    ),
    "keywords": (Keywords, (4,), {}),
}


@pytest.mark.parametrize("kind", NORMS)
def test_the_norm_is_that_of_layers_whose_gradient_is_known(kind):
    """What cannot be had from one backward is left out and named; the rest is what autograd says, sample by sample."""
    make, shape, expected = NORMS[kind]
    model = make()
    x, y = torch.randn(40, *shape), torch.randint(0, 3, (40,))
    data = [list(zip(x[k : k + 20].split(8), y[k : k + 20].split(8), strict=True)) for k in (0, 20)]
    result = leakage(model, *data, draws=5)
    said = {key.removeprefix("gradient of "): why for key, why in result.left_out.items() if "gradient of " in key}
    assert said.keys() == expected.keys() and all(why in said[path] for path, why in expected.items())
    counted = [
        parameter
        for path, module in model.named_modules()
        for parameter in module.parameters(recurse=False)
        if isinstance(module, nn.Linear) and repr(path) not in expected
    ]
    norms = []
    for sample, target in zip(x, y, strict=True):
        found = torch.autograd.grad(F.cross_entropy(model.eval()(sample[None]), target[None]), counted)
        norms.append(-torch.cat([part.flatten() for part in found]).norm())
    exact = roc_auc_score([1] * 20 + [0] * 20, torch.stack(norms))
    assert result["gradient norm"].auc.value == pytest.approx(exact, abs=1e-6)
    if kind == "attention":
        assert {"gradients of ConvTranspose1d", "gradients of MultiheadAttention"} < result.left_out.keys()


def test_a_model_that_is_frozen_has_no_gradient_norm():
    model, x = nn.Sequential(nn.Linear(4, 3)).requires_grad_(False), torch.randn(8, 4)
    result = leakage(model, [(x, torch.zeros(8).long())], [(x, torch.zeros(8).long())], draws=5)
    assert "gradient norm" in result.left_out and "gradient norm" not in [signal.name for signal in result.signals]


def test_auc_and_true_positives_are_those_of_scikit_learn():
    draw = torch.Generator().manual_seed(0)
    inside, outside = torch.randn(1500, generator=draw) + 0.7, torch.randn(2000, generator=draw)
    inside, outside = (inside * 20).round() / 20, (outside * 20).round() / 20  # with ties
    labels, scores = [1] * 1500 + [0] * 2000, torch.cat([inside, outside])
    found = auc_of(inside, outside)
    assert found.value == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    false, true, _ = roc_curve(labels, scores, drop_intermediate=False)
    for rate in (0.001, 0.01, 0.2):
        value = true_positives(inside, outside, rate, 200, draw)
        assert value.value == pytest.approx(true[false <= rate].max(), abs=1e-12)
        assert value.low <= value.value <= value.high


def test_confidence_intervals_hold_the_truth_as_often_as_they_say():
    draw = torch.Generator().manual_seed(0)
    normal = torch.distributions.Normal(0.0, 1.0)
    truth = normal.cdf(torch.tensor(1.0)), normal.cdf(2**0.5 - normal.icdf(torch.tensor(0.8)))  # of two, √2 apart
    held = [0, 0]
    for _ in range(300):
        inside, outside = torch.randn(80, generator=draw) + 2**0.5, torch.randn(120, generator=draw)
        found = auc_of(inside, outside)
        held[0] += found.low <= truth[0] <= found.high
        rate = true_positives(inside, outside, 0.2, 200, draw)
        held[1] += rate.low <= truth[1] <= rate.high
    assert 0.91 < held[0] / 300 < 0.985 and 0.88 < held[1] / 300 < 0.99, held


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def overfit():
    """An overfit classifier of digits, a fifth of whose labels are wrong; it saw the first half of them."""
    x, y = load_digits(return_X_y=True)
    draw = torch.Generator().manual_seed(0)
    some = torch.randperm(len(x), generator=draw)[:600]
    x, y = torch.tensor(x, dtype=torch.float32)[some] / 16, torch.tensor(y)[some]
    wrong = torch.rand(600, generator=draw) < 0.2
    y[wrong] = torch.randint(0, 10, (int(wrong.sum()),), generator=draw)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(300):
        optimizer.zero_grad()
        F.cross_entropy(model(x[:300]), y[:300]).backward()
        optimizer.step()
    model.zero_grad()
    return model, x, y


def batches(x, y, size=50):
    return list(zip(x.split(size), y.split(size), strict=True))


def test_the_members_of_an_overfit_model_can_be_told(overfit):
    model, x, y = overfit
    hooks = hooks_of(model)
    result = leakage(model, batches(x[:300], y[:300]), batches(x[300:], y[300:], 64))
    assert hooks_of(model) == hooks and model.training and model[0].weight.grad is None
    assert (result.members, result.non_members) == (300, 300)
    for name in ("loss", "confidence", "gradient norm"):
        assert 0.62 < result[name].auc.value < 0.75 and result[name].auc.low > 0.55
    assert 0.54 < result["entropy"].auc.value < result["loss"].auc.value - 0.03
    activations = [signal for signal in result.signals if signal.name == "activations"]
    assert sorted(signal.site for signal in activations) == list("01234")
    assert all(0.42 < signal.auc.value < 0.6 for signal in activations)
    assert result.signals[0].auc.value == max(signal.auc.value for signal in result.signals)
    with torch.no_grad():
        losses = F.cross_entropy(model(x), y, reduction="none")
    assert result["loss"].auc.value == pytest.approx(roc_auc_score([1] * 300 + [0] * 300, -losses), abs=1e-4)
    again = leakage(model, batches(x[:300], y[:300]), batches(x[300:], y[300:], 64))
    assert again.table("list") == result.table("list")


def test_what_a_model_was_not_trained_on_cannot_be_told(overfit):
    _, x, y = overfit
    result = leakage(mlp(), batches(x[:300], y[:300]), batches(x[300:], y[300:]))
    assert all(0.4 < signal.auc.value < 0.6 for signal in result.signals)


def test_activations_that_tell_are_found():
    """Members that lie elsewhere in one direction of many are told from the layer that keeps it."""
    x = torch.randn(200, 20)
    x[:100, 7] += 2
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 1))
    result = leakage(model, [(x[:100], torch.zeros(100, 1))], [(x[100:], torch.zeros(100, 1))])
    assert result["activations of 0"].auc.low > 0.8 and result.signals[0].name == "activations"


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (8, 4), (32, 5), (128, 3)])
def test_how_many_a_shared_gradient_gives_away(overfit, size, expected):
    _, x, y = overfit
    torch.manual_seed(0)
    model = mlp()
    members = [(x[:size], y[:size]), (x[300:308], y[300:308])]
    result = leakage(model, members, [(x[400:420], y[400:420])], draws=10)
    first = result.shared[0]
    with torch.no_grad():
        active = model[0](x[:size]) > 0
    mine = (active & (active.sum(0) == 1)).any(1).nonzero()[:, 0].tolist()
    assert list(first.alone) == list(first.inverted) == mine and len(mine) == expected
    assert result.layer == "0" and result.given_away >= expected
    assert f"reveals its exact input for {result.given_away} of {size + 8} members" in repr(result)


def test_a_loss_of_ones_own_sequences_and_reasons():
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)

        def forward(self, tokens, labels=None):
            return {"logits": self.head(self.norm(self.fc(tokens)).mean(1))}

    def data():
        return [{"tokens": torch.randn(8, 3, 4), "labels": torch.randint(0, 2, (8,))} for _ in range(2)]

    model = Pooled()
    result = leakage(model, data(), data(), draws=10)
    assert result.layer is None and "'fc' is applied to several positions" in repr(result)
    assert {signal.name for signal in result.signals} == {
        "loss",
        "confidence",
        "entropy",
        "gradient norm",
        "activations",
    }
    members, others = data(), data()
    plain = leakage(model, members, others, draws=10)
    own = leakage(model, members, others, lambda output, target: F.cross_entropy(output["logits"], target), draws=10)
    assert own["loss"].auc.value == pytest.approx(plain["loss"].auc.value, abs=0.02)
    assert "<td>gradient norm</td>" in plain._repr_html_()


def test_samples_whose_score_is_nan_do_not_count():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
    bad = x.clone()
    bad[0] = torch.nan
    result = leakage(model, [(bad[:20], y[:20])], [(x[20:], y[20:])], draws=5)
    plain = leakage(model, [(x[1:20], y[1:20])], [(x[20:], y[20:])], draws=5)
    for name in ("loss", "confidence", "entropy", "gradient norm"):
        assert result[name].auc == plain[name].auc
        assert result.left_out[name] == "it is NaN for 1 members and 0 others, which do not count"
    assert "the gradient of '0' is not finite" in repr(result)
    few = leakage(model, [(x[:20] * torch.nan, y[:20])], [(x[20:], y[20:])], draws=5)
    assert "loss" in few.left_out and not few.signals
    with pytest.raises(ValueError, match="scores must not be NaN"):
        auc_of(bad[:, 0], x[:, 0])
    with pytest.raises(ValueError, match="scores must not be NaN"):
        true_positives(x[:, 0], bad[:, 0], 0.1, 5, torch.Generator())


def test_targets_that_are_ignored_do_not_count():
    model = nn.Conv2d(3, 4, 1)
    x, y = torch.randn(20, 3, 5, 6), torch.randint(0, 4, (20, 5, 6))
    for number in range(20):
        y[number, :, number % 5 :] = -100
    result = leakage(model, [(x[:10], y[:10])], [(x[10:], y[10:])], draws=5)
    losses = [F.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).item() for k in range(20)]
    inside, outside = ([-loss for loss in some if loss == loss] for some in (losses[:10], losses[10:]))
    exact = roc_auc_score([1] * len(inside) + [0] * len(outside), inside + outside)
    assert result["loss"].auc.value == pytest.approx(exact, abs=1e-9) and len(inside) == 8
    assert result.left_out["loss"].startswith("it is NaN for 2 members and 2 others")
    labels = torch.randint(0, 2, (16,))
    labels[3] = -100
    result = leakage(nn.Linear(3, 2), [(torch.randn(16, 3), labels)], [(torch.randn(16, 3), labels)], draws=5)
    assert {"loss", "confidence", "entropy", "gradient norm"} <= result.left_out.keys()


@pytest.mark.parametrize("words", [20, 10])
def test_a_loss_of_tokens_is_not_guessed(words):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=words, n_positions=16, n_embd=16, n_layer=1, n_head=2)).eval()
    ids = torch.randint(0, words, (12, 10))
    data = [{"input_ids": some, "labels": some} for some in ids.split(6)]
    with pytest.raises(ValueError, match="which output belongs to which target is unknown; pass loss="):
        leakage(model, data, data, draws=5)

    def loss(output, target):
        return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())

    result = leakage(model, data[:1], data[1:], loss, draws=5)
    own = [-model(input_ids=one[None], labels=one[None]).loss.item() for one in ids]
    assert result["loss"].auc.value == pytest.approx(roc_auc_score([1] * 6 + [0] * 6, own), abs=1e-6)
    assert "used elsewhere" in result.left_out["gradient of 'lm_head'"]  # by the embedding


def test_a_loss_that_the_model_brings_along_is_not_overruled():
    class Smooth(nn.Module):
        def __init__(self, smoothing):
            super().__init__()
            self.fc, self.smoothing = nn.Linear(4, 3), smoothing

        def forward(self, x, labels):
            logits = self.fc(x)
            return {"loss": F.cross_entropy(logits, labels, label_smoothing=self.smoothing), "logits": logits}

    data = [{"x": 9 * torch.randn(16, 4), "labels": torch.randint(0, 3, (16,))}]
    assert leakage(Smooth(0.0), data, data, draws=5)["loss"].auc.value == 0.5
    with pytest.raises(
        ValueError, match=r"the model's own loss for a batch is .*, but the guessed one is .*; pass loss="
    ):
        leakage(Smooth(0.9), data, data, draws=5)


def test_no_more_samples_than_wanted_other_dtypes_and_buffers():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.fc(x)

    model = Counting().bfloat16()
    data = [(torch.randn(64, 4), torch.randint(0, 3, (64,))) for _ in range(2)]
    result = leakage(model, data, data, max_samples=70, draws=5)
    assert (result.members, result.non_members) == (70, 70) and [batch.size for batch in result.shared] == [64, 6]
    assert model.calls == 0 and not any(key.startswith("gradient of") for key in result.left_out)


def test_what_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(8, 3)
    with pytest.raises(
        TypeError, match="members must be a tensor, a tuple or dict of them, or an iterable of such batches"
    ):
        leakage(model, 7, [x])
    with pytest.raises(ValueError, match="members has 2 samples, but at least 5 are needed"):
        leakage(model, [(x[:2], torch.zeros(2).long())], [(x, torch.zeros(8).long())])
    with pytest.raises(ValueError, match="cannot guess the loss: .*; pass loss="):
        leakage(model, [x], [x])
    with pytest.raises(KeyError, match="no signal 'los'; there are"):
        leakage(model, [(x, torch.zeros(8).long())], [(x, torch.zeros(8).long())], draws=5)["los"]
