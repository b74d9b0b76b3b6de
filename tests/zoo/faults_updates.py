"""Faults of the optimizer: parameters that it lacks, and steps that are too large or too small."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, Sites, anywhere, fault, inside, pick
from zoo.healthy_special import pretrained
from zoo.healthy_tables import digits_unit
from zoo.healthy_vision import convnet, convnet_batchnorm, resnet_functional, unet, vit_encoder_layers
from zoo.nets import ResNet, ViT
from zoo.tasks import digits

_PARTS = ("blocks.1", "patches", "head", "norm")


@fault("TH503", sites=lambda seed: inside(part_forgotten.build(seed).model, pick(seed, *_PARTS)))
def part_forgotten(seed: int) -> Case:
    """A submodule is trainable but not in the optimizer."""
    torch.manual_seed(seed)
    model = ViT(width=pick(seed, 24, 32), depth=2)
    left = pick(seed, *_PARTS)
    held = [parameter for path, parameter in model.named_parameters() if not path.startswith(left + ".")]
    return Case(model, digits(seed), F.cross_entropy, torch.optim.AdamW(held, 3e-3))


@fault("TH503", sites=("head", "head.weight", "head.bias"))
def head_replaced(seed: int) -> Case:
    """The optimizer was created before the model got its new head, and still has the old one."""
    model = pretrained(seed)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.manual_seed(seed + 1)
    model.head = nn.Linear(model.head.in_features, 5)
    return Case(model, digits(seed, classes=range(5, 10)), F.cross_entropy, optimizer)


@fault("TH503", "TH504", sites=lambda seed: anywhere(other_model.build(seed).model))
def other_model(seed: int) -> Case:
    """The optimizer belongs to another model of the same kind."""
    case = pick(seed, convnet, digits_unit).build(seed)
    case.model = pick(seed, convnet, digits_unit).build(seed).model
    return case


@fault("TH504", sites=lambda seed: inside(group_at_zero.build(seed).model, f"blocks.{seed % 2}"))
def group_at_zero(seed: int) -> Case:
    """One group of parameters has a learning rate of 0."""
    torch.manual_seed(seed)
    model = ResNet(width=pick(seed, 12, 16), depth=2)
    still = set(model.blocks[seed % 2].parameters())
    rest = [parameter for parameter in model.parameters() if parameter not in still]
    groups = [{"params": rest}, {"params": list(still), "lr": 0.0}]
    return Case(model, digits(seed), F.cross_entropy, torch.optim.SGD(groups, 0.02, momentum=0.9))


@fault("TH501", sites=lambda seed: anywhere(rate_too_high.build(seed).model))
def rate_too_high(seed: int) -> Case:
    case = pick(seed, convnet, digits_unit, vit_encoder_layers).build(seed)
    case.optimizer = torch.optim.Adam(case.model.parameters(), pick(seed, 0.2, 0.5))
    return case


@fault("TH501", sites=lambda seed: anywhere(rate_too_high_sgd.build(seed).model))
def rate_too_high_sgd(seed: int) -> Case:
    case = convnet_batchnorm.build(seed)
    case.optimizer = torch.optim.SGD(case.model.parameters(), pick(seed, 3.0, 10.0))
    return case


@fault("TH502", sites=lambda seed: anywhere(rate_too_low.build(seed).model))
def rate_too_low(seed: int) -> Case:
    case = pick(seed, convnet, resnet_functional, unet).build(seed)
    case.optimizer = pick(seed, torch.optim.Adam, torch.optim.SGD)(case.model.parameters(), lr=1e-8)
    return case


def _slow_sites(seed: int) -> Sites:
    return inside(body_too_slow.build(seed).model, "features")


@fault("TH502", sites=_slow_sites)
def body_too_slow(seed: int) -> Case:
    """Two groups, with a wrong exponent in one of the learning rates."""
    case = convnet.build(seed)
    features, head = case.model.features.parameters(), case.model.head.parameters()
    case.optimizer = torch.optim.Adam([{"params": features, "lr": 1e-9}, {"params": head, "lr": 3e-3}])
    return case


SPECIMENS = (
    part_forgotten,
    head_replaced,
    other_model,
    group_at_zero,
    rate_too_high,
    rate_too_high_sgd,
    rate_too_low,
    body_too_slow,
)
