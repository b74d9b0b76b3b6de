"""Healthy trainings of plain networks, on tables and on flattened pictures."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, healthy, pick
from zoo.nets import FunctionalMlp, Mlp
from zoo.tasks import blobs, cancer, diabetes, digits, rings


@healthy
def tanh_regression(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Mlp([10, *[pick(seed, 16, 32)] * pick(seed, 1, 2, 3)], act=nn.Tanh, classes=1)
    return Case(model, diabetes(seed), F.mse_loss, torch.optim.Adam(model.parameters(), 5e-3), steps=80)


@healthy
def digits_unit(seed: int) -> Case:
    """Pixels from 0 to 1: many at the border are always 0."""
    torch.manual_seed(seed)
    model = Mlp([64, *[pick(seed, 32, 64)] * pick(seed, 2, 3)])
    data = digits(seed, scale="unit")
    return Case(model, data, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), steps=100)


@healthy
def imbalanced(seed: int) -> Case:
    """One class makes up 90% of the samples."""
    torch.manual_seed(seed)
    model = Mlp([16, pick(seed, 16, 32), 16], classes=4)
    data = blobs(seed, share=(0.9, 0.05, 0.03, 0.02))
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))


@healthy
def deep_kaiming(seed: int) -> Case:
    """Twenty layers, initialised correctly."""
    torch.manual_seed(seed)
    model = Mlp([8, *[pick(seed, 32, 48)] * 20], classes=3)
    for layer in model.layers:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return Case(model, rings(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-4), steps=80)


class LogSoftmaxMlp(Mlp):
    def forward(self, x):
        return F.log_softmax(super().forward(x), dim=1)


@healthy
def dropout_nll(seed: int) -> Case:
    """Half of the features are dropped; log-probabilities go to the loss that expects them."""
    torch.manual_seed(seed)
    model = LogSoftmaxMlp([64, pick(seed, 64, 96)], dropout=0.5)
    return Case(model, digits(seed), F.nll_loss, torch.optim.Adam(model.parameters(), 5e-3))


def _logit_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(output.squeeze(1), target.float())


@healthy
def binary(seed: int) -> Case:
    torch.manual_seed(seed)
    model = FunctionalMlp([30, *[pick(seed, 8, 16)] * pick(seed, 1, 2)], act=F.elu, classes=1)
    return Case(model, cancer(seed), _logit_loss, torch.optim.RMSprop(model.parameters(), 1e-3))


@healthy
def selu_regression(seed: int) -> Case:
    """Plain SGD, and SELU, which normalises itself."""
    torch.manual_seed(seed)
    model = Mlp([10, *[24] * pick(seed, 2, 4)], act=nn.SELU, classes=1)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    nn.init.normal_(model.head.weight, std=0.05)
    return Case(model, diabetes(seed), F.smooth_l1_loss, torch.optim.SGD(model.parameters(), 0.02), steps=80)


SPECIMENS = (tanh_regression, digits_unit, imbalanced, deep_kaiming, dropout_nll, binary, selu_regression)
