"""Faults of the loss and its targets, and of inputs on a wrong scale."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, anywhere, fault, pick
from zoo.healthy_special import pretrained
from zoo.healthy_tables import digits_unit
from zoo.healthy_vision import convnet, convnet_batchnorm, resnet_inplace
from zoo.nets import ConvNet, Mlp
from zoo.tasks import cancer, diabetes, digits, generator


@fault("TH601")
def random_labels(seed: int) -> Case:
    """There is nothing to learn: the labels are random for each batch."""
    case = pick(seed, convnet, convnet_batchnorm, digits_unit).build(seed)
    case.steps = 80
    g = generator(seed)
    case.data = [(x, torch.randint(10, y.shape, generator=g)) for x, y in digits(seed, batches=case.steps)]
    return case


@fault("TH601", "TH606")
def uphill(seed: int) -> Case:
    """A sign is wrong: the optimizer ascends."""
    case = pick(seed, convnet, resnet_inplace).build(seed)
    rate = pick(seed, 1e-3, 3e-3)
    case.optimizer = torch.optim.Adam(case.model.parameters(), rate, maximize=True)
    return case


class Probabilities(ConvNet):
    """Returns probabilities where logits are expected."""

    def forward(self, x):
        return F.softmax(super().forward(x), dim=1)


@fault("TH604", sites=("", "softmax", "head"))
def softmax_twice(seed: int) -> Case:
    torch.manual_seed(seed)
    if pick(seed, True, False):
        model = Probabilities(width=pick(seed, 8, 12), depth=2)
    else:
        model = nn.Sequential()
        model.add_module("body", Mlp([64, pick(seed, 32, 48)]))
        model.add_module("softmax", nn.Softmax(dim=1))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class Squeezed(Mlp):
    def forward(self, x):
        return super().forward(x).squeeze(1)


@fault("TH605", sites=("", "head"))
def broadcast_targets(seed: int) -> Case:
    """(N, 1) against (N,), or the other way round: each output is compared with every target."""
    torch.manual_seed(seed)
    sizes = [10, *[pick(seed, 16, 32)] * 2]
    data = diabetes(seed)
    if pick(seed, True, False):
        model, data = Mlp(sizes, classes=1), [(x, y.squeeze(1)) for x, y in data]
    else:
        model = Squeezed(sizes, classes=1)
    loss = pick(seed, F.mse_loss, F.l1_loss)
    return Case(model, data, loss, torch.optim.Adam(model.parameters(), 5e-3))


@fault("TH303", sites=("", "features.conv0", "features.conv0.weight"))
def pixels_as_bytes(seed: int) -> Case:
    """Pixels from 0 to 255, as read from the file."""
    case = convnet.build(seed)
    case.data = digits(seed, scale="raw")
    return case


@fault("TH303", sites=("", "layers.linear0", "layers.linear0.weight"))
def table_as_measured(seed: int) -> Case:
    """Columns between 0.01 and 4000 side by side."""
    torch.manual_seed(seed)
    model = Mlp([30, *[pick(seed, 16, 32)] * pick(seed, 1, 2)], classes=2)
    return Case(model, cancer(seed, scale=False), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-3))


_CHANGES = {
    "brighter": lambda x: x + 1.5,
    "contrast": lambda x: x * 2.5,
    "noise": lambda x: x + 1.2 * torch.randn(x.shape, generator=generator(len(x))),
    "inverted": lambda x: 1.0 - x,
}


@fault("TH901", sites=lambda seed: anywhere(drifted_pictures.build(seed).model))
def drifted_pictures(seed: int) -> Case:
    """The live pictures come from a different camera than those of the profile."""
    model = pretrained(seed)
    change = _CHANGES[pick(seed, *_CHANGES)]
    live = [(change(x), y) for x, y in digits(seed + 1, classes=range(5))]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    return Case(model, live, F.cross_entropy, optimizer, profile_data=digits(seed, classes=range(5)))


@fault("TH901", sites=lambda seed: anywhere(drifted_unit.build(seed).model))
def drifted_unit(seed: int) -> Case:
    """One or a few columns of a table have a different unit than in the profile."""
    torch.manual_seed(seed)
    model = Mlp([30, *[pick(seed, 16, 32)] * 2], classes=2)
    factor = torch.ones(30)
    factor[seed % 30 : seed % 30 + pick(seed, 3, 6)] = 10.0
    live = [(x * factor, y) for x, y in cancer(seed + 1)]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    return Case(model, live, F.cross_entropy, optimizer, profile_data=cancer(seed))


SPECIMENS = (
    random_labels,
    uphill,
    softmax_twice,
    broadcast_targets,
    pixels_as_bytes,
    table_as_measured,
    drifted_pictures,
    drifted_unit,
)
