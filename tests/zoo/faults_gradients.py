"""Faults of the backward pass: gradients that vanish, explode, jump or never arrive."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, Sites, anywhere, fault, inside, pick
from zoo.healthy_sequences import Reader, gpt
from zoo.healthy_tables import tanh_regression
from zoo.healthy_vision import convnet
from zoo.nets import ConvNet, FunctionalMlp, Mlp, Recurrent, UNet
from zoo.tasks import bags, blobs, coins, digits, waves


@fault("TH401", "TH301", sites=lambda seed: anywhere(vanishing_sigmoid.build(seed).model))
def vanishing_sigmoid(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Mlp([16, *[pick(seed, 24, 32)] * pick(seed, 8, 10, 12)], act=nn.Sigmoid, classes=4)
    return Case(model, blobs(seed), F.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


_RECURRENT = ("rnn", "rnn.weight_hh_l0", "rnn.weight_ih_l0", "rnn.bias_hh_l0", "rnn.bias_ih_l0")


@fault("TH402", sites=_RECURRENT)
def exploding_rnn(seed: int) -> Case:
    """Each of 24 time steps multiplies by almost two."""
    torch.manual_seed(seed)
    model = Recurrent(1, width=pick(seed, 24, 32), classes=4, kind=nn.RNN, nonlinearity="relu")
    nn.init.orthogonal_(model.rnn.weight_hh_l0, gain=pick(seed, 2.6, 2.9))
    return Case(model, waves(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-4))


@fault("TH402", sites=_RECURRENT)
def chaotic_rnn(seed: int) -> Case:
    """Its activations stay between -1 and 1, while its gradients grow from time step to time step."""
    torch.manual_seed(seed)
    width = 48
    model = Recurrent(1, width=width, classes=4, kind=nn.RNN)
    nn.init.normal_(model.rnn.weight_hh_l0, std=pick(seed, 3.0, 4.0) / width**0.5)
    nn.init.normal_(model.rnn.weight_ih_l0, std=0.1)
    return Case(model, waves(seed, length=48), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-4), steps=40)


SPIKE = 35


@fault("TH403", "TH602", sites=lambda seed: anywhere(corrupt_pictures.build(seed).model), step=SPIKE)
def corrupt_pictures(seed: int) -> Case:
    """One batch was decoded wrongly: a hundred times as bright."""
    case = convnet.build(seed)
    case.data = digits(seed, batches=60)
    x, y = case.data[SPIKE]
    case.data[SPIKE] = (x * pick(seed, 50, 100), y)
    return case


@fault("TH602", "TH403", sites=lambda seed: anywhere(corrupt_targets.build(seed).model), step=SPIKE)
def corrupt_targets(seed: int) -> Case:
    """Some targets of one batch are in another unit."""
    case = tanh_regression.build(seed)
    case.steps = 60
    case.data = [case.data[i % len(case.data)] for i in range(case.steps)]
    x, y = case.data[SPIKE]
    case.data[SPIKE] = (x, torch.where(torch.arange(len(y)).view(-1, 1) % 4 == 0, y * 60, y))
    return case


@fault("TH602", "TH403", sites=lambda seed: anywhere(other_text.build(seed).model), step=SPIKE)
def other_text(seed: int) -> Case:
    """A language model of English gets one batch of two alternating rare letters."""
    case = gpt.build(seed)
    case.data = [dict(case.data[i % len(case.data)]) for i in range(case.steps)]
    ids = torch.full_like(case.data[SPIKE]["ids"], 26)
    ids[:, 1::2] = 17
    case.data[SPIKE] = {"ids": ids, "labels": ids}
    return case


class Cut(FunctionalMlp):
    """Cuts the graph after one of its layers."""

    def __init__(self, sizes, at: int):
        super().__init__(sizes)
        self.at = at

    def forward(self, x):
        x = x.flatten(1)
        for i, linear in enumerate(self.linears):
            x = self.act(linear(x))
            x = x.detach() if i == self.at else x
        return self.head(x)


def _cut_sites(seed: int) -> Sites:
    return inside(detached.build(seed).model, *(f"linears.{i}" for i in range(1 + seed % 3)))


@fault("TH404", sites=_cut_sites)
def detached(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Cut([64, *[pick(seed, 32, 48)] * 4], at=seed % 3)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class NoGradReader(Reader):
    """Its embedding and its GRU run without a graph, left over from when they were frozen."""

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(2)
        with torch.no_grad():
            out, _ = self.gru(self.words(ids))
        return self.head((out * mask).sum(1) / mask.sum(1))


@fault("TH404", sites=lambda seed: inside(left_in_no_grad.build(seed).model, "words", "gru"))
def left_in_no_grad(seed: int) -> Case:
    torch.manual_seed(seed)
    model = NoGradReader(width=pick(seed, 12, 16))
    return Case(model, bags(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


class Rounding(nn.Module):
    """Rounds to eight levels: its derivative is 0 wherever it exists."""

    def forward(self, x):
        return (x * 8).round() / 8


class Quantised(ConvNet):
    def __init__(self, **options):
        super().__init__(**options)
        self.rounding = Rounding()

    def forward(self, x):
        return self.head(self.rounding(self.features(x)).flatten(1))


@fault("TH404", "TH401", sites=lambda seed: ("rounding", *inside(rounded.build(seed).model, "features")))
def rounded(seed: int) -> Case:
    """Quantisation without a straight-through estimator: gradients arrive, and all are 0."""
    torch.manual_seed(seed)
    model = Quantised(width=pick(seed, 8, 12), depth=pick(seed, 2, 3), norm=nn.BatchNorm2d)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class Auxiliary(ConvNet):
    """Has a second head that its forward does not call."""

    def __init__(self, **options):
        super().__init__(**options)
        self.auxiliary = nn.Sequential(nn.Linear(self.head.in_features, 16), nn.ReLU(), nn.Linear(16, 10))


@fault("TH404", sites=lambda seed: inside(head_not_called.build(seed).model, "auxiliary"))
def head_not_called(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Auxiliary(width=pick(seed, 8, 12), depth=2)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class LostSkip(UNet):
    """On one level, only the path through the middle is used; its own stage is called to no effect."""

    def __init__(self, width: int):
        super().__init__(width)
        self.deepest = nn.Conv2d(2 * width, 2 * width, 3, padding=1)

    def forward(self, x):
        kept = []
        for stage in self.down:
            kept.append(stage(x))
            x = F.max_pool2d(kept[-1], 2)
        self.deepest(x)
        x = self.middle(x)
        for grow, stage in zip(self.grow, self.up, strict=True):
            x = stage(torch.cat([grow(x), kept.pop()], 1))
        return self.out(x)


@fault("TH404", sites=lambda seed: inside(result_thrown_away.build(seed).model, "deepest"))
def result_thrown_away(seed: int) -> Case:
    """A convolution is called, but its output is not used."""
    torch.manual_seed(seed)
    model = LostSkip(pick(seed, 6, 8))
    loss = F.binary_cross_entropy_with_logits
    return Case(model, coins(seed), loss, torch.optim.Adam(model.parameters(), 5e-3), steps=30)


SPECIMENS = (
    vanishing_sigmoid,
    exploding_rnn,
    chaotic_rnn,
    corrupt_pictures,
    corrupt_targets,
    other_text,
    detached,
    left_in_no_grad,
    rounded,
    head_not_called,
    result_thrown_away,
)
