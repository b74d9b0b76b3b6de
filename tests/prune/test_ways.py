"""Where channels go in models that are not a plain chain: two ways, round a loop, in other orders, all together."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.prune import l1_unstructured
from torch.utils.data import DataLoader, TensorDataset

from torchhook.core.batch import Batch
from torchhook.prune.ablation import sensitivity
from torchhook.prune.planner import plan
from torchhook.prune.score_points import ModuleCall, score_points
from torchhook.prune.scores import importance
from torchhook.prune.surgery import apply

pytestmark = pytest.mark.usefixtures("one_thread")


class Made(nn.Module):
    """Of a function and the modules that it uses."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def classes(*shape, n=9):
    return torch.randn(n, *shape), torch.randint(0, 3, (n,))


def test_a_tensor_that_plain_code_uses_too_is_where_channels_come_out():
    def swish(m, x):
        h = m.fc(x)
        return m.out(h * m.sigmoid(h))

    by_hand = Made(swish, fc=nn.Linear(8, 6), sigmoid=nn.Sigmoid(), out=nn.Linear(6, 3))
    data = [classes(8)]
    found = importance(by_hand, data)["fc"]
    at_once = Made(lambda m, x: m.out(F.silu(m.fc(x))), fc=by_hand.fc, out=by_hand.out)
    torch.testing.assert_close(found, importance(at_once, data)["fc"], rtol=1e-4, atol=1e-7)


def test_a_residual_before_the_norm():
    def run(m, x):
        y = m.stem(x)
        return m.out(y + m.fc(m.relu(m.norm(y))))

    parts = {"stem": nn.Linear(8, 6), "norm": nn.BatchNorm1d(6), "relu": nn.ReLU(), "fc": nn.Linear(6, 6)}
    model = Made(run, **parts, out=nn.Linear(6, 3)).eval()
    assert score_points(model, Batch.of(torch.ones(2, 8))).chains[ModuleCall("stem", 0)] == ("stem",)
    with torch.no_grad():
        model.norm.weight[0] = model.norm.bias[0] = 0
    assert importance(model, [classes(8)], "activation")["stem"][0] > 0


def test_what_the_model_gives_as_well():
    def run(m, x):
        h = m.fc(x)
        return m.relu(h), h

    found = score_points(Made(run, fc=nn.Linear(8, 6), relu=nn.ReLU()), Batch.of(torch.ones(2, 8)))
    assert found.chains == {ModuleCall("fc", 0): ("fc",)}


@pytest.mark.parametrize("by", ["taylor", "fisher", "activation", "apoz"])
def test_loops_of_other_lengths_than_in_the_first_batch(by):
    def run(m, x):
        h = torch.zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = m.relu(m.fc(m.relu(x[:, t]) + h))  # the relu is called more often than the layer
        return m.out(h)

    model = Made(run, fc=nn.Linear(8, 8), relu=nn.ReLU(), out=nn.Linear(8, 3))
    short, long = classes(2, 8), classes(6, 8)
    whole, first, second = (importance(model, data, by)["fc"] for data in ([short, long], [short], [long]))
    weights = (1 / 2, 1 / 2) if by in ("taylor", "fisher") else (2 / 8, 6 / 8)  # values are counted, losses by sample
    torch.testing.assert_close(whole, first * weights[0] + second * weights[1])
    torch.testing.assert_close(importance(model, [long, short], by)["fc"], whole)


def test_loops_whose_calls_are_not_alike_are_refused():
    def run(m, x):
        h = torch.zeros(len(x), 8)
        for t in range(x.shape[1]):
            h = m.fc(x[:, t] + h)
            h = m.relu(h) if t < x.shape[1] - 1 else h
        return m.out(h)

    model = Made(run, fc=nn.Linear(8, 8), relu=nn.ReLU(), out=nn.Linear(8, 3))
    for lengths in ((2, 6), (6, 2)):
        with pytest.raises(ValueError, match="the output of 'fc' goes through other modules in a later batch"):
            importance(model, [classes(length, 8) for length in lengths])
    assert list(importance(model, [classes(3, 8), classes(3, 8)])) == ["fc", "out"]


def tokens(way):
    def run(m, x):
        n, t, _ = x.shape
        if way == "flat":
            h = torch.tanh(m.fc(x.reshape(n * t, 8))).view(n, t, 6).mean(1)
        elif way == "flat, sequence first":
            h = torch.tanh(m.fc(x.transpose(0, 1).reshape(n * t, 8))).view(t, n, 6).mean(0)
        elif way == "sequence first":
            h = torch.tanh(m.fc(x.transpose(0, 1))).mean(0)
        else:
            h = torch.tanh(m.fc(x)).mean(1)
        return m.out(h)

    torch.manual_seed(1)
    return Made(run, fc=nn.Linear(8, 6), out=nn.Linear(6, 3))


@pytest.mark.parametrize("by", ["taylor", "fisher"])
def test_rows_that_are_parts_of_samples_are_put_together(by):
    data = [classes(5, 8)]
    expected = importance(tokens("plain"), data, by)["fc"]
    torch.testing.assert_close(importance(tokens("flat"), data, by)["fc"], expected)


@pytest.mark.parametrize("length", [5, 9, 18])  # no multiple of the batch, the batch, twice the batch
@pytest.mark.parametrize("way", ["sequence first", "flat, sequence first"])
def test_rows_that_are_not_those_of_samples_are_left_out(way, length):
    found = importance(tokens(way), [classes(length, 8)])
    assert list(found) == ["out"] and "does not have one row per sample" in found.left_out["fc"]
    with pytest.raises(ValueError, match="'fc': its output does not have one row per sample"):
        plan(found, ratio=0.2)
    assert list(importance(tokens("plain"), [classes(length, 8)])) == ["fc", "out"]


def test_rows_that_cannot_be_told_are_left_out():
    def run(m, x):
        if len(x) < 2:
            raise RuntimeError("too few")
        return m.out(torch.tanh(m.fc(x.flatten(0, 1))).view(len(x), -1, 6).mean(1))

    found = importance(Made(run, fc=nn.Linear(8, 6), out=nn.Linear(6, 3)), [classes(5, 8)] * 2)
    assert (
        list(found) == ["out"]
        and "cannot check for one row per sample" in found.left_out["fc"]
        and "too few" in found.left_out["fc"]
    )


def conv(given, gives, kernel=3):
    return nn.Conv2d(given, gives, kernel, padding=kernel // 2)


def gated(layer, following, dims):
    def run(m, x):
        u, v = m.a(x).chunk(2, 1)
        h = m.b(u * v.sigmoid())
        return m.out(h.mean(dims) if dims else h)

    return Made(run, a=layer, b=following, out=nn.Linear(6, 3))


@pytest.mark.parametrize("ratio", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_channels_of_one_layer_that_go_together_are_one_choice(kind, ratio):
    linear = kind == "linear"
    model = gated(nn.Linear(8, 12), nn.Linear(6, 6), ()) if linear else gated(conv(3, 12), conv(6, 6), (2, 3))
    x, y = classes(8) if linear else classes(3, 8, 8)
    found = importance(model, [(x, y)])
    chosen = plan(found, ratio=ratio, ignore="b")
    gone = chosen.channels["a"]
    assert len(gone) == 2 * round(6 * ratio) and {c % 6 for c in gone[: len(gone) // 2]} == {
        c - 6 for c in gone if c > 5
    }
    together = found["a"].view(2, 6).mean(0)
    assert {c % 6 for c in gone} == set(together.argsort()[: len(gone) // 2].tolist())
    result = apply(model, chosen, runs=1)
    assert result.model.a.weight.shape[0] == 12 - len(gone) and result.flops == chosen.flops and result.verified


def test_one_choice_always_stays():
    model = gated(nn.Linear(8, 12), nn.Linear(6, 6), ())
    chosen = plan(importance(model, [classes(8)]), ratio=10 / 12, most=1.0)
    assert len(chosen.channels["a"]) == 10 and apply(model, chosen, runs=1).verified


def reordered(order, width=6, given=6):
    return Made(
        lambda m, x: m.out(m.b(order(F.relu(m.a(x)))).mean((2, 3))),
        a=conv(3, width),
        b=conv(given, 6),
        out=nn.Linear(6, 3),
    )


@pytest.mark.parametrize("dead", [False, True])
@pytest.mark.parametrize("order", ["flip", "roll", "permute"])
def test_cuts_of_the_wrong_channels_are_refused(order, dead):
    model = {
        "flip": lambda: reordered(lambda h: h.flip(1)),
        "roll": lambda: reordered(lambda h: h.roll(1, 1)),
        "permute": lambda: Made(
            lambda m, x: m.out(F.relu(m.a(x)).permute(0, 2, 3, 1).flatten(1)), a=conv(3, 6), out=nn.Linear(384, 3)
        ),
    }[order]()
    if dead:
        with torch.no_grad():
            model.a.weight[:2] = 0
            model.a.bias[:2] = -1
    chosen = plan(importance(model, [classes(3, 8, 8)]), ratio=0.34, ignore="b" if hasattr(model, "b") else ())
    with pytest.raises(ValueError, match=r"would be cut wrongly: .*another order.*plan\(ignore=\)"):
        apply(model, chosen, runs=1, inplace=True)
    assert model.a.out_channels == 6


def test_channels_that_become_fewer_unseen_stay():
    for model in (reordered(lambda h: F.glu(h, 1), 12), reordered(lambda h: F.pixel_shuffle(h, 2), 16, 4)):
        chosen = plan(importance(model, [classes(3, 8, 8)]), ratio=0.3)
        assert "receives fewer channels" in chosen.left_out["a"] and apply(model, chosen, runs=1).verified


def test_what_can_be_verified_and_what_cannot():
    sigmoid = reordered(torch.sigmoid)  # of a zero it is a half, and yet nothing is wrong
    norm = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    softmax = reordered(lambda h: h.softmax(1))
    for model, data, said in (
        (sigmoid, classes(3, 8, 8), ""),
        (norm, classes(8), "native_layer_norm"),
        (softmax, classes(3, 8, 8), "softmax"),
    ):
        result = apply(model, plan(importance(model, [data]), ratio=0.4), runs=1)
        assert result.verified == (not said) and said in result.note
        assert ("not verified" in repr(result)) == bool(said)


def chain():
    return Made(
        lambda m, x: m.out(F.relu(m.c(F.relu(m.b(F.relu(m.a(x))))))),
        **{k: nn.Linear(8, 8) for k in "abc"},
        out=nn.Linear(8, 3),
    )


def test_parameters_that_cannot_be_cut_stay_with_the_reason():
    tied = chain()
    tied.b.weight = tied.a.weight
    masked = chain()
    l1_unstructured(masked.a, "weight", 0.5)
    norm, spectral = chain(), chain()
    nn.utils.parametrizations.weight_norm(norm.a)
    nn.utils.parametrizations.spectral_norm(spectral.a)
    for model, said in (
        (tied, "shared by 'a.weight' and 'b.weight'"),
        (masked, "a mask of torch.nn.utils.prune"),
        (norm, "come from a parametrization"),
        (spectral, "come from a parametrization"),
    ):
        chosen = plan(importance(model, [classes(8)]), ratio=0.3)
        assert said in chosen.left_out["a"] and "a" not in chosen.channels
        assert set(chosen.channels) == ({"c"} if model is tied else {"b", "c"})
        result = apply(model, chosen, runs=1)
        assert result.verified and result.model.a.out_features == 8
        result.model(torch.ones(2, 8)).sum().backward()


def test_of_several_norms_behind_one_layer_the_one_that_does_most_counts():
    def run(m, x):
        return m.out(m.two(m.fc(m.one(m.fc(x)).relu())).relu())

    model = Made(run, fc=nn.Linear(8, 8), one=nn.BatchNorm1d(8), two=nn.BatchNorm1d(8), out=nn.Linear(8, 3))
    with torch.no_grad():
        model.one.weight[1] = model.two.weight[0] = model.one.weight[2] = model.two.weight[2] = 0
    for by in ("l1", "wanda"):
        found = importance(model, [classes(8)], by)["fc"]
        assert found[0] > 0 and found[1] > 0 and found[2] == 0


def test_random_numbers_and_buffers_are_as_before():
    def run(m, x):
        m.seen += 1
        return m.out(m.fc(x).relu())

    model = Made(run, fc=nn.Linear(8, 8), out=nn.Linear(8, 3))
    model.register_buffer("seen", torch.zeros(()))
    loader = DataLoader(TensorDataset(*classes(8)), batch_size=3, shuffle=True)
    state = torch.get_rng_state()
    found = importance(model, loader)
    sensitivity(model, loader, F.cross_entropy)
    chosen = plan(found, ratio=0.3)
    results = [apply(model, chosen, loader=loader, runs=1, inplace=inplace) for inplace in (False, True)]
    assert torch.equal(torch.get_rng_state(), state)
    assert model.seen == 0 and results[0].model.seen == 0 and results[1].model is model


def test_the_labels_of_a_mapping_are_the_target():
    model = Made(lambda m, x, labels: {"logits": m.out(m.fc(x).relu())}, fc=nn.Linear(8, 8), out=nn.Linear(8, 3))
    x, y = classes(8)
    found = importance(model, [{"x": x, "labels": y}])
    plain = importance(Made(lambda m, x: m.out(m.fc(x).relu()), fc=model.fc, out=model.out), [(x, y)])
    torch.testing.assert_close(found["fc"], plain["fc"])
    assert apply(model, plan(found, ratio=0.3), runs=1).loss is not None
    given = importance(
        model, [{"x": x, "labels": y}], loss=lambda out, batch: F.cross_entropy(out["logits"], batch["labels"])
    )
    torch.testing.assert_close(given["fc"], plain["fc"])
