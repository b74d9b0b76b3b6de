"""Faults of the initial weights: too small, too large, identical, of rank one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, Sites, anywhere, fault, inside, pick
from zoo.healthy_special import Siamese, autoencoder
from zoo.healthy_tables import digits_unit
from zoo.healthy_vision import convnet_batchnorm, convnet_textures, vit_encoder_layers
from zoo.nets import FunctionalMlp, Mlp
from zoo.tasks import blobs, digits


def _deep(seed: int, depth: int, std: float, act=nn.ReLU) -> Case:
    torch.manual_seed(seed)
    model = Mlp([16, *[pick(seed, 48, 64)] * depth], act=act, classes=4)
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
    return Case(model, blobs(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-3))


@fault("TH301", sites=lambda seed: anywhere(small_weights.build(seed).model))
def small_weights(seed: int) -> Case:
    """Twenty layers of N(0, 0.01), or not much more."""
    return _deep(seed, 20, pick(seed, 0.01, 0.03), pick(seed, nn.ReLU, nn.Tanh))


@fault("TH301", sites=lambda seed: anywhere(large_weights.build(seed).model))
def large_weights(seed: int) -> Case:
    return _deep(seed, pick(seed, 10, 14), 0.5)


_ALIKE = (3, 4)


def _alike_sites(seed: int) -> Sites:
    at = seed % pick(seed, *_ALIKE)
    return f"linears.{at}", f"linears.{at}.weight"


@fault("TH302", sites=_alike_sites)
def constant_layer(seed: int) -> Case:
    """All weights of one layer are the same number: its units stay copies of one."""
    torch.manual_seed(seed)
    depth = pick(seed, *_ALIKE)
    model = FunctionalMlp([64, *[pick(seed, 32, 48)] * depth])
    at = model.linears[seed % depth]
    nn.init.constant_(at.weight, pick(seed, 0.02, 0.05))
    nn.init.zeros_(at.bias)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


@fault("TH302", sites=lambda seed: anywhere(constant_everywhere.build(seed).model))
def constant_everywhere(seed: int) -> Case:
    """The same number for all weights of all layers: equivalent to one unit in each."""
    case = pick(seed, convnet_batchnorm, digits_unit).build(seed)
    for module in case.model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.constant_(module.weight, pick(seed, 0.01, 0.03))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return case


@fault(
    "TH302",
    "TH204",
    sites=lambda seed: tuple(
        f"layers.{at}{seed % 3}{part}" for at, part in (("linear", ""), ("linear", ".weight"), ("act", ""))
    ),
)
def zero_layer(seed: int) -> Case:
    """A layer of zeros before a ReLU, whose derivative at 0 is 0."""
    torch.manual_seed(seed)
    model = Mlp([64, *[32] * 3])
    at = model.layers[2 * (seed % 3)]
    nn.init.zeros_(at.weight)
    nn.init.zeros_(at.bias)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


@fault("TH603", sites=("head", "head.weight"))
def large_head(seed: int) -> Case:
    """Fifty times too large: confidently wrong before any training."""
    case = pick(seed, convnet_textures, convnet_batchnorm, vit_encoder_layers).build(seed)
    with torch.no_grad():
        case.model.head.weight *= 50
    return case


@fault(
    "TH801", sites=lambda seed: inside(rank_one.build(seed).model, f"layers.linear{seed % 2}", f"layers.act{seed % 2}")
)
def rank_one(seed: int) -> Case:
    """A wide layer whose weight is an outer product lets one direction through."""
    torch.manual_seed(seed)
    width = pick(seed, 48, 64)
    model = Mlp([64, width, width], act=nn.Tanh)
    weight = model.layers[2 * (seed % 2)].weight
    with torch.no_grad():
        weight.copy_(torch.outer(torch.randn(width), torch.randn(weight.shape[1])) / weight.shape[1] ** 0.5)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.01))


@fault("TH801", sites=("0", "0.2", "0.2.weight"))
def rank_one_code(seed: int) -> Case:
    """The encoder's last layer writes one number in many places."""
    case = autoencoder.build(seed)
    weight = case.model[0][2].weight
    with torch.no_grad():
        weight.copy_(torch.outer(torch.randn(len(weight)), torch.randn(weight.shape[1])) / weight.shape[1] ** 0.5)
    case.optimizer = torch.optim.SGD(case.model.parameters(), 2.0)
    return case


class Collapsing(Siamese):
    """Without BatchNorm, a predictor or a stopped gradient: the best solution is a constant output."""

    def __init__(self, width: int):
        nn.Module.__init__(self)
        self.encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        x = x.flatten(1)
        return [self.encoder(x + 0.3 * torch.randn_like(x)) for _ in range(2)]


def _apart(output, _batch) -> torch.Tensor:
    return F.mse_loss(*output)


@fault("TH801", "TH204", "TH201", sites=lambda seed: anywhere(collapse.build(seed).model))
def collapse(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Collapsing(pick(seed, 24, 32))
    data = [x for x, _ in digits(seed)]
    return Case(model, data, _apart, torch.optim.Adam(model.parameters(), 1e-2), steps=80)


SPECIMENS = (
    small_weights,
    large_weights,
    constant_layer,
    constant_everywhere,
    zero_layer,
    large_head,
    rank_one,
    rank_one_code,
    collapse,
)
