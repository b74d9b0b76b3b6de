"""Faults of what differs between training and use: the statistics of BatchNorm, and dropout."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, Sites, fault, pick
from zoo.healthy_special import FrozenNorms, pretrained
from zoo.healthy_vision import convnet_batchnorm, resnet_inplace, unet
from zoo.nets import ConvNet, Mlp
from zoo.tasks import digits


def _norms(model: nn.Module) -> Sites:
    return tuple(path for path, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))


def _broken_sites(seed: int) -> Sites:
    return f"features.norm{seed % 2}", f"features.norm{seed % 2}.running_var"


@fault("TH703", "TH102", sites=_broken_sites)
def broken_variance(seed: int) -> Case:
    """A loaded running variance is negative, zero or NaN in a few channels; the model is used in eval mode."""
    model = pretrained(seed).eval()
    value = (-0.5, 0.0, torch.nan)[seed % 3]
    getattr(model.features, f"norm{seed % 2}").running_var[: pick(seed, 1, 3)] = value
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-3)
    model.features.requires_grad_(False)
    return Case(model, digits(seed, classes=range(5, 10)), F.cross_entropy, optimizer)


@fault("TH702", sites=lambda seed: ("", *_norms(eval_from_the_start.build(seed).model)))
def eval_from_the_start(seed: int) -> Case:
    """In eval mode although its BatchNorm layers have never seen a batch."""
    case = pick(seed, convnet_batchnorm, resnet_inplace, unet).build(seed)
    case.model.eval()
    return case


@fault("TH701", sites=lambda seed: _norms(statistics_stand_still.build(seed).model))
def statistics_stand_still(seed: int) -> Case:
    """The momentum is so small that running statistics stay where they started."""
    case = pick(seed, convnet_batchnorm, resnet_inplace).build(seed)
    for module in case.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = pick(seed, 1e-4, 1e-6)
    return case


@fault("TH701", "TH704", sites=lambda seed: ("", *_norms(statistics_of_the_last.build(seed).model)))
def statistics_of_the_last(seed: int) -> Case:
    """The momentum is so large that running statistics reflect only the last batch, and batches alternate."""
    torch.manual_seed(seed)
    model = ConvNet(width=pick(seed, 8, 12), depth=2, norm=lambda width: nn.BatchNorm2d(width, momentum=0.95))
    data = [(x * 3 + 2 if i % 2 else x, y) for i, (x, y) in enumerate(digits(seed))]
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


@fault("TH701", "TH303", sites=lambda seed: ("", "body.features.conv0", *_norms(other_preprocessing.build(seed).model)))
def other_preprocessing(seed: int) -> Case:
    """A pretrained model with frozen statistics, fed with pixels on a different scale than in its training."""
    model = FrozenNorms(pretrained(seed))
    data = [(x * 6 + 5, y) for x, y in digits(seed, classes=range(5, 10))]
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-3))


class Normed(nn.Module):
    """Linear, BatchNorm, ReLU, twice; dropout before each BatchNorm if asked for."""

    def __init__(self, width: int, dropout: float = 0.0):
        super().__init__()
        self.linear0, self.linear1 = nn.Linear(64, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        self.norm0, self.norm1 = nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.norm0(self.linear0(x.flatten(1))))
        x = F.relu(self.norm1(self.linear1(self.dropout(x))))
        return self.head(x)


@fault("TH704", "TH701", sites=("", "norm0", "norm1", "head"))
def tiny_batches(seed: int) -> Case:
    """BatchNorm over two or three samples."""
    torch.manual_seed(seed)
    model = Normed(pick(seed, 32, 48))
    data = digits(seed, batches=120, size=pick(seed, 2, 3))
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3), steps=120)


@fault("TH704", "TH701", sites=("", "dropout", "norm1", "head"))
def dropout_before_norm(seed: int) -> Case:
    """Dropout enlarges the variance that BatchNorm keeps for eval mode, where nothing is dropped."""
    torch.manual_seed(seed)
    model = Normed(pick(seed, 48, 64), dropout=pick(seed, 0.8, 0.9))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


@fault("TH704", sites=("", "dropout", "head"))
def dropout_of_nearly_all(seed: int) -> Case:
    torch.manual_seed(seed)
    if pick(seed, True, False):
        model = Mlp([64, pick(seed, 48, 64)], dropout=0.95)
    else:
        model = ConvNet(width=8, depth=2, dropout=0.95)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


SPECIMENS = (
    broken_variance,
    eval_from_the_start,
    statistics_stand_still,
    statistics_of_the_last,
    other_preprocessing,
    tiny_batches,
    dropout_before_norm,
    dropout_of_nearly_all,
)
