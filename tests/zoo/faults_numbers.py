"""Faults that produce NaN or infinity, or values close to the maximum of float16."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, Sites, fault, inside, pick
from zoo.healthy_sequences import Reader, lstm
from zoo.healthy_tables import digits_unit
from zoo.healthy_vision import convnet, vit_encoder_layers
from zoo.nets import ConvNet, Mlp
from zoo.tasks import bags, cancer, digits, waves

BAD = 25
"""The step whose batch triggers the fault."""


class LogEnergy(nn.Module):
    """The logarithm of each channel's energy: minus infinity where there is silence."""

    def forward(self, x):
        return x.square().mean(2).log()


class Hearing(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.filters = nn.Conv1d(1, width, 7, bias=False)
        self.energy = LogEnergy()
        self.classifier = Mlp([width, 16], classes=4)

    def forward(self, x):
        return self.classifier(self.energy(self.filters(x.transpose(1, 2))))


@fault("TH101", sites=("energy",), step=BAD)
def log_of_silence(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Hearing(pick(seed, 8, 16))
    data = waves(seed, batches=60)
    data[BAD][0][pick(seed, 0, 5, 9)] = 0
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


class Spread(nn.Module):
    """The mean and the deviation over all pixels, by a formula that may take the root of a negative number."""

    def forward(self, x):
        mean = x.mean((2, 3))
        return torch.cat([mean, (x.square().mean((2, 3)) - mean**2).sqrt()], 1)


@fault("TH101", "TH103", sites=lambda seed: (str(2 * pick(seed, 1, 2, 3)),), step=BAD)
def root_of_rounding(seed: int) -> Case:
    """Some pictures of one batch are blank."""
    torch.manual_seed(seed)
    depth, width = pick(seed, 1, 2, 3), pick(seed, 8, 12)
    layers = []
    for i in range(depth):
        layers += [nn.Conv2d(width if i else 1, width, 3), nn.GELU()]
    model = nn.Sequential(*layers, Spread(), nn.Linear(2 * width, 10))
    data = digits(seed, batches=60)
    x = data[BAD][0]
    x[::2] = torch.linspace(-3, 3, len(x[::2])).view(-1, 1, 1, 1)
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))


class Filed(nn.Module):
    """A model one level further down."""

    def __init__(self, reader: nn.Module):
        super().__init__()
        self.reader = reader

    def forward(self, ids):
        return self.reader(ids)


def _empty_sentences(seed: int) -> list:
    data = bags(seed, batches=60)
    data[BAD][0][3] = 0
    return data


@fault("TH101", sites=lambda seed: ("reader", "reader.head") if pick(seed, True, False) else ("", "head"), step=BAD)
def empty_sentence(seed: int) -> Case:
    """The average over the words of a sentence that has none: 0 / 0, between the GRU and the head."""
    torch.manual_seed(seed)
    model = Reader(width=pick(seed, 12, 16))
    model = Filed(model) if pick(seed, True, False) else model
    return Case(model, _empty_sentences(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


class MaskedAttention(nn.Module):
    """Attention written out, which masks padding by minus infinity."""

    def __init__(self, width: int):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[2] ** 0.5
        weights = scores.masked_fill(~mask[:, None, :], -torch.inf).softmax(2)
        return self.out(weights @ self.v(x))


class AttentiveReader(nn.Module):
    def __init__(self, width: int, depth: int):
        super().__init__()
        self.words = nn.Embedding(21, width, padding_idx=0)
        self.layers = nn.ModuleList(MaskedAttention(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)

    def forward(self, ids):
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x, ids != 0)
        return self.head(self.norm(x).mean(1))


@fault("TH101", sites=("layers.0", "layers.0.out"), step=BAD)
def all_masked(seed: int) -> Case:
    """A sentence of padding alone leaves the softmax nothing to choose from."""
    torch.manual_seed(seed)
    model = AttentiveReader(pick(seed, 16, 24), pick(seed, 1, 2))
    return Case(model, _empty_sentences(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


_LOADED = (
    (convnet, "features.conv1.weight"),
    (vit_encoder_layers, "blocks.0.linear1.weight"),
    (lstm, "rnn.weight_hh_l0"),
    (digits_unit, "layers.linear1.bias"),
)


def _loaded_sites(seed: int) -> Sites:
    path = pick(seed, *(path for _, path in _LOADED))
    return path, path.rpartition(".")[0]


@fault("TH102", sites=_loaded_sites)
def nan_in_checkpoint(seed: int) -> Case:
    """One number of one loaded weight is NaN."""
    path = pick(seed, *(path for _, path in _LOADED))
    case = {at: specimen for specimen, at in _LOADED}[path].build(seed)
    with torch.no_grad():
        case.model.get_parameter(path).view(-1)[seed % 7] = torch.nan
    return case


class Standardise(nn.Module):
    """Centres and scales by statistics of the data, which it keeps."""

    def __init__(self, x: torch.Tensor):
        super().__init__()
        self.register_buffer("mean", x.mean(0))
        self.register_buffer("scale", 1 / x.std(0))

    def forward(self, x):
        return (x - self.mean) * self.scale


@fault("TH102", sites=("standardise.scale", "standardise"))
def infinite_scale(seed: int) -> Case:
    """1 / deviation of pixels at the border that are 0 in every picture."""
    torch.manual_seed(seed)
    data = [(x.flatten(1), y) for x, y in digits(seed, scale="unit")]
    model = nn.Sequential()
    model.add_module("standardise", Standardise(torch.cat([x for x, _ in data])))
    model.add_module("body", Mlp([64, *[pick(seed, 32, 48)] * pick(seed, 1, 2)]))
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class SignedRoot(nn.Module):
    """The root of each value's size, with its sign: at 0 its derivative is 0 times infinity."""

    def forward(self, x):
        return x.sign() * x.abs().sqrt()


class Bilinear(nn.Module):
    """How much each pair of channels has in common, over all pixels: 0 for many pairs after a ReLU."""

    def forward(self, x):
        x = x.flatten(2)
        return x @ x.transpose(1, 2) / x.shape[2]


class BilinearNet(ConvNet):
    def __init__(self, **options):
        super().__init__(**options)
        self.bilinear, self.root = Bilinear(), SignedRoot()
        width = self.head.in_features // 16
        self.head = nn.Linear(width**2, 10)

    def forward(self, x):
        return self.head(self.root(self.bilinear(self.features(x))).flatten(1))


def _root_sites(seed: int) -> Sites:
    last = pick(seed, 2, 3) - 1
    return "root", "bilinear", f"features.act{last}", *inside(signed_root.build(seed).model, f"features.conv{last}")


@fault("TH103", sites=_root_sites)
def signed_root(seed: int) -> Case:
    """Bilinear pooling without a small number under the root: finite forward, NaN backward."""
    torch.manual_seed(seed)
    model = BilinearNet(width=pick(seed, 8, 12), depth=pick(seed, 2, 3))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class Weighted(nn.Module):
    """A learned weight for each count."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(0.5 + torch.rand(width))

    def forward(self, x):
        return x * self.weight


class Surprise(nn.Module):
    """x log x, with a guard at 0 that does not protect the gradient."""

    def forward(self, x):
        return torch.where(x > 0, x * x.log(), torch.zeros_like(x))


@fault("TH103", sites=("1", "0", "0.weight"))
def guarded_log(seed: int) -> Case:
    """The branch of ``torch.where`` that was not taken sends back NaN."""
    torch.manual_seed(seed)
    model = nn.Sequential(Weighted(64), Surprise(), Mlp([64, pick(seed, 32, 64)]))
    data = [(x.flatten(1), y) for x, y in digits(seed, scale="unit")]
    return Case(model, data, F.cross_entropy, torch.optim.SGD(model.parameters(), 0.05))


class GuardedReader(Reader):
    def forward(self, ids):
        mask = (ids != 0).unsqueeze(2).float()
        out, _ = self.gru(self.words(ids))
        mean = (out * mask).sum(1) / mask.sum(1)
        return self.head(torch.where(mask.sum(1) > 0, mean, torch.zeros_like(mean)))


@fault("TH103", sites=lambda seed: ("", *inside(guarded_division.build(seed).model, "gru")), step=BAD)
def guarded_division(seed: int) -> Case:
    """The same, for one sentence of one batch: 0 / 0 is repaired in the forward, but NaN in the backward."""
    torch.manual_seed(seed)
    model = GuardedReader(width=pick(seed, 12, 16))
    return Case(model, _empty_sentences(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


@fault("TH104", step=BAD)
def targets_ignored(seed: int) -> Case:
    """All targets of one batch are -100, to be ignored: the mean over none of them."""
    case = convnet.build(seed)
    case.data = digits(seed, batches=60)
    case.data[BAD] = (case.data[BAD][0], torch.full_like(case.data[BAD][1], -100))
    return case


def _written_out(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    p, y = output.squeeze(1), target.float()
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


@fault("TH104", step=BAD)
def loss_of_certainty(seed: int) -> Case:
    """Cross entropy written out: the logarithm of 0 once a sample is so far out that its probability is 1."""
    torch.manual_seed(seed)
    model = nn.Sequential(Mlp([30, pick(seed, 8, 16)], classes=1), nn.Sigmoid())
    data = cancer(seed, batches=60)
    x, y = data[BAD]
    x[y == 1] *= 1 + 60 * (torch.arange(int(y.sum())) == 0).view(-1, 1)
    x[y == 0] *= 1 + 60 * (torch.arange(int((y == 0).sum())) == 0).view(-1, 1)
    return Case(model, data, _written_out, torch.optim.Adam(model.parameters(), 1e-2))


class Energy(nn.Module):
    """Squares of 8-bit brightness, kept in half precision."""

    def __init__(self, brightest: float):
        super().__init__()
        self.brightest = brightest

    def forward(self, x):
        return (x * self.brightest).half().square()


class Spectrum(nn.Module):
    """The spectrum of a 16-bit recording, kept in half precision."""

    def forward(self, x):
        return (torch.fft.rfft(x.squeeze(2) * 3500).abs()).half()


class Lowered(nn.Module):
    """Back to single precision and to a scale for networks."""

    def forward(self, x):
        return x.float().flatten(1) / 2e4


@fault("TH105", sites=("0",))
def near_the_end_of_half(seed: int) -> Case:
    """Values of about 50000 in float16, whose maximum is 65504."""
    torch.manual_seed(seed)
    if pick(seed, True, False):
        first, width, classes, data = Energy(pick(seed, 228.0, 240.0)), 64, 10, digits(seed, scale="unit")
    else:
        first, width, classes, data = Spectrum(), 13, 4, waves(seed)
    model = nn.Sequential(first, Lowered(), Mlp([width, 32], classes=classes))
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))


SPECIMENS = (
    log_of_silence,
    root_of_rounding,
    empty_sentence,
    all_masked,
    nan_in_checkpoint,
    infinite_scale,
    signed_root,
    guarded_log,
    guarded_division,
    targets_ignored,
    loss_of_certainty,
    near_the_end_of_half,
)
