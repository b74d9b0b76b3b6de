"""Faults of single layers whose units contribute nothing: dead, dormant, saturated, constant."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, Sites, backward, fault, pick
from zoo.healthy_special import autoencoder
from zoo.healthy_vision import convnet, resnet_inplace, vit_warmup
from zoo.nets import ConvNet, FunctionalMlp, FunctionalResidual, Mlp, ResNet
from zoo.tasks import diabetes, digits, waves


def _lowered(bias: torch.Tensor, share: float, by: float = 12.0) -> None:
    """Push this share of the units far below zero."""
    with torch.no_grad():
        bias[: round(share * len(bias))] -= by


def _dead_place(seed: int) -> int:
    return seed % pick(seed, 2, 3, 4)


@fault("TH201", sites=lambda seed: tuple(f"features.{kind}{_dead_place(seed)}" for kind in ("conv", "act")))
def dead_relu(seed: int) -> Case:
    """Three quarters or all of the channels of one convolution."""
    case = convnet.build(seed)
    _lowered(getattr(case.model.features, f"conv{_dead_place(seed)}").bias, pick(seed, 0.75, 1.0))
    return case


@fault("TH201", sites=lambda seed: (f"linears.{seed % 3}",))
def dead_relu_functional(seed: int) -> Case:
    torch.manual_seed(seed)
    model = FunctionalMlp([64, *[pick(seed, 32, 48)] * 3])
    _lowered(model.linears[seed % 3].bias, pick(seed, 0.7, 0.9))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def _residual_sites(seed: int) -> Sites:
    return tuple(f"blocks.{seed % 2}{part}" for part in (".bn1", ".relu", ""))


@fault("TH201", sites=_residual_sites)
def dead_relu_inplace(seed: int) -> Case:
    """Inside a residual block, after BatchNorm."""
    case = resnet_inplace.build(seed)
    _lowered(case.model.blocks[seed % 2].bn1.bias, 0.9)
    return case


@fault("TH201", sites=lambda seed: tuple(f"blocks.{seed % 2}{part}" for part in (".bn1", "")))
def dead_relu_residual_functional(seed: int) -> Case:
    torch.manual_seed(seed)
    model = ResNet(width=pick(seed, 12, 16), depth=2, block=FunctionalResidual)
    _lowered(model.blocks[seed % 2].bn1.bias, 0.9)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.02, momentum=0.9))


JUMP = 30


@fault(
    "TH201",
    "TH501",
    sites=("", *(f"layers.{kind}{i}" for kind in ("linear", "act") for i in range(3))),  # all layers share the rate
    step=JUMP,
)
def relus_die(seed: int) -> Case:
    """At one step the learning rate is far too large, and the units that it killed stay dead."""
    torch.manual_seed(seed)
    model = Mlp([64, *[pick(seed, 32, 64)] * 3])
    case = Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))

    def loop(watch) -> None:
        for step in range(case.steps):
            case.optimizer.param_groups[0]["lr"] = 15.0 if step == JUMP else 0.05
            loss = backward(case, case.data[step % len(case.data)])
            case.optimizer.step()
            watch.step(loss)

    case.loop = loop
    return case


@fault("TH202", "TH201", sites=lambda seed: tuple(f"blocks.{seed % 2}.{part}" for part in ("fc1", "act")))
def dormant_gelu(seed: int) -> Case:
    case = vit_warmup.build(seed)
    case.loop = None
    _lowered(case.model.blocks[seed % 2].fc1.bias, pick(seed, 0.75, 0.95))
    return case


@fault("TH203", sites=lambda seed: tuple(f"layers.{kind}{seed % 3}" for kind in ("linear", "act")))
def saturated_sigmoid(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Mlp([64, *[32] * 3], act=nn.Sigmoid)
    for i, layer in enumerate(model.layers[::2]):
        nn.init.xavier_normal_(layer.weight, gain=3 if i else 1)
    with torch.no_grad():
        model.layers[2 * (seed % 3)].weight *= pick(seed, 15, 25)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))


@fault("TH203", sites=lambda seed: tuple(f"layers.{kind}{seed % 2}" for kind in ("linear", "act")))
def saturated_tanh(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Mlp([10, *[pick(seed, 16, 32)] * 2], act=nn.Tanh, classes=1)
    with torch.no_grad():
        model.layers[2 * (seed % 2)].weight *= 40
    return Case(model, diabetes(seed), F.mse_loss, torch.optim.Adam(model.parameters(), 5e-3))


@fault("TH203", sites=lambda seed: tuple(f"features.{kind}{seed % 2}" for kind in ("conv", "act")))
def saturated_tanh_conv(seed: int) -> Case:
    """By its biases: each unit is stuck at one of the two ends."""
    torch.manual_seed(seed)
    model = ConvNet(width=pick(seed, 8, 12), depth=2, act=nn.Tanh)
    with torch.no_grad():
        bias = getattr(model.features, f"conv{seed % 2}").bias
        bias += 8 * torch.where(torch.arange(len(bias)) % 2 == 0, 1.0, -1.0)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class Gated(nn.Module):
    """Two convolutions over time, one of which is a gate for the other."""

    def __init__(self, width: int):
        super().__init__()
        self.value, self.gate = nn.Conv1d(1, width, 5), nn.Conv1d(1, width, 5)
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x):
        x = x.transpose(1, 2)
        x = self.value(x) * torch.sigmoid(self.gate(x))
        return self.head(torch.cat([x.mean(2), x.amax(2)], 1))


@fault("TH301", "TH202", "TH203", "TH204", sites=("gate",))
def gate_shut(seed: int) -> Case:
    """A sigmoid, called as a function, that lets nothing through."""
    torch.manual_seed(seed)
    model = Gated(pick(seed, 12, 16))
    _lowered(model.gate.bias, 1.0, by=15.0)
    return Case(model, waves(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))


def _zeroed_sites(seed: int) -> Sites:
    return tuple(f"features.{kind}{seed % 2}" for kind in ("norm", "act"))


@fault("TH204", "TH201", "TH302", sites=_zeroed_sites)
def zero_scale(seed: int) -> Case:
    """BatchNorm weights set to 0 where no shortcut goes around them."""
    torch.manual_seed(seed)
    model = ConvNet(width=pick(seed, 8, 12), depth=2, norm=nn.BatchNorm2d)
    nn.init.zeros_(getattr(model.features, f"norm{seed % 2}").weight)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


@fault("TH201", sites=("1.0", "1.1"))
def dead_decoder(seed: int) -> Case:
    """The hidden layer of an autoencoder's second half."""
    case = autoencoder.build(seed)
    _lowered(case.model[1][0].bias, pick(seed, 0.8, 0.95))
    return case


SPECIMENS = (
    dead_relu,
    dead_relu_functional,
    dead_relu_inplace,
    dead_relu_residual_functional,
    dead_decoder,
    relus_die,
    dormant_gelu,
    saturated_sigmoid,
    saturated_tanh,
    saturated_tanh_conv,
    gate_shut,
    zero_scale,
)
