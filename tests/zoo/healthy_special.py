"""Healthy trainings that look odd: several optimizers, frozen parts, experts, half precision."""

from __future__ import annotations

import copy
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, healthy, pick
from zoo.nets import ConvNet, Mlp, ViT
from zoo.tasks import blobs, digits


def _to_batch(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, batch)


@healthy
def autoencoder(seed: int) -> Case:
    torch.manual_seed(seed)
    code, width = pick(seed, 8, 16), pick(seed, 32, 64)
    encoder = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, code))
    decoder = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid())
    model = nn.Sequential(encoder, decoder)
    data = [x.flatten(1) for x, _ in digits(seed, scale="unit")]
    return Case(model, data, _to_batch, torch.optim.Adam(model.parameters(), 5e-3))


class Variational(nn.Module):
    """A variational autoencoder: returns the picture, the mean and the log variance."""

    def __init__(self, width: int, code: int):
        super().__init__()
        self.enc, self.mean, self.logvar = nn.Linear(64, width), nn.Linear(width, code), nn.Linear(width, code)
        self.dec, self.out = nn.Linear(code, width), nn.Linear(width, 64)

    def forward(self, x):
        h = F.relu(self.enc(x))
        mean, logvar = self.mean(h), self.logvar(h)
        code = mean + torch.randn_like(mean) * (logvar / 2).exp() if self.training else mean
        return self.out(F.relu(self.dec(code))), mean, logvar


def _evidence(output, batch: torch.Tensor) -> torch.Tensor:
    picture, mean, logvar = output
    apart = F.binary_cross_entropy_with_logits(picture, batch, reduction="sum")
    return (apart - 0.5 * (1 + logvar - mean**2 - logvar.exp()).sum()) / len(batch)


@healthy
def variational(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Variational(pick(seed, 32, 64), pick(seed, 4, 8))
    data = [x.flatten(1) for x, _ in digits(seed, scale="unit")]
    return Case(model, data, _evidence, torch.optim.Adam(model.parameters(), 2e-3))  # at 5e-3 most units die


@healthy
def gan(seed: int) -> Case:
    """A generator and a discriminator, each with its optimizer; points on a circle. No loss is meant to fall."""
    torch.manual_seed(seed)
    width = pick(seed, 24, 32)
    leaky = {"act": lambda: nn.LeakyReLU(0.2), "classes": 1}
    model = nn.ModuleDict(
        {"generator": Mlp([4, width, width], classes=2), "discriminator": Mlp([2, width, width], **leaky)}
    )
    fake, judge = model["generator"], model["discriminator"]
    optimizer = torch.optim.Adam(fake.parameters(), 4e-3, betas=(0.0, 0.9))
    other = torch.optim.Adam(judge.parameters(), 8e-3, betas=(0.0, 0.9))
    angles = [6.28 * torch.rand(64, 1) for _ in range(120)]
    data = [torch.cat([angle.cos(), angle.sin()], 1) for angle in angles]

    def loop(watch) -> None:
        for real in data:
            made = fake(torch.randn(64, 4))
            other.zero_grad()
            (F.softplus(-judge(real)).mean() + F.softplus(judge(made.detach())).mean()).backward()
            other.step()
            optimizer.zero_grad()
            F.softplus(-judge(made)).mean().backward()
            optimizer.step()
            watch.step()

    return Case(model, data, None, None, steps=len(data), loop=loop)


class Experts(nn.Module):
    """Each sample goes to the two experts that the router likes best."""

    def __init__(self, width: int, experts: int, top: int = 2):
        super().__init__()
        self.top = top
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x):
        weights, chosen = self.router(x).topk(self.top, dim=1)
        weights = weights.softmax(1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, weights[rows, place, None] * expert(x[rows]))
        return x + out


@healthy
def mixture_of_experts(seed: int) -> Case:
    """Some experts get no samples of some batches."""
    torch.manual_seed(seed)
    width = pick(seed, 16, 24)
    model = nn.Sequential(
        nn.Linear(16, width), Experts(width, pick(seed, 4, 6, 8)), nn.LayerNorm(width), nn.Linear(width, 6)
    )
    data = blobs(seed, size=24, classes=6)
    return Case(model, data, F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


@lru_cache(maxsize=8)
def _pretrained(seed: int) -> tuple[dict, int, int]:
    """The state of a network that has learned the digits 0 to 4, its width and depth."""
    torch.manual_seed(seed)
    width, depth = pick(seed, 8, 12), pick(seed, 2, 3)
    model = ConvNet(width, depth, norm=nn.BatchNorm2d, classes=5)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for x, y in digits(seed, batches=80, classes=range(5)):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict(), width, depth


def pretrained(seed: int) -> ConvNet:
    """A network that knows the digits 0 to 4, with a new head for the others."""
    state, width, depth = _pretrained(seed)
    model = ConvNet(width, depth, norm=nn.BatchNorm2d, classes=5)
    model.load_state_dict(copy.deepcopy(state))
    torch.manual_seed(seed)
    model.head = nn.Linear(model.head.in_features, 5)
    return model


class FrozenNorms(nn.Module):
    """A network whose BatchNorm layers always stay in eval mode."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body
        self.train()

    def train(self, mode: bool = True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self

    def forward(self, x):
        return self.body(x)


@healthy
def finetuned(seed: int) -> Case:
    """The body learns ten times more slowly than the new head; its BatchNorm layers keep their statistics."""
    model = FrozenNorms(pretrained(seed))
    body, head = model.body.features.parameters(), model.body.head.parameters()
    optimizer = torch.optim.AdamW([{"params": body, "lr": 1e-4}, {"params": head, "lr": 3e-3}])
    return Case(model, digits(seed, classes=range(5, 10)), F.cross_entropy, optimizer)


@healthy
def linear_probe(seed: int) -> Case:
    """Only the new head learns; the frozen rest is not in the optimizer, and in eval mode."""
    model = pretrained(seed).eval()
    model.features.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), 0.02, momentum=0.9)
    return Case(model, digits(seed, classes=range(5, 10)), F.cross_entropy, optimizer)


class Lora(nn.Module):
    """A frozen linear layer and a low-rank correction that starts at zero."""

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + 2 * self.b(self.a(x))


@lru_cache(maxsize=8)
def _vision_transformer(seed: int) -> dict:
    torch.manual_seed(seed)
    model = ViT(width=24, depth=2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for x, y in digits(seed, batches=80):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


@healthy
def lora(seed: int) -> Case:
    """A transformer that knows the digits learns flipped digits by low-rank corrections to its weights."""
    model = ViT(width=24, depth=2)
    model.load_state_dict(copy.deepcopy(_vision_transformer(seed)))
    model.requires_grad_(False)
    torch.manual_seed(seed)
    for block in model.blocks:
        for module, name in ((block.attn, "qkv"), (block, "fc1"), (block, "fc2")):
            setattr(module, name, Lora(getattr(module, name), pick(seed, 2, 4)))
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = [(x.flip(2), y) for x, y in digits(seed)]
    return Case(model, data, F.cross_entropy, torch.optim.AdamW(learned, 1e-2), steps=60)


class Autocast(nn.Module):
    """Runs a network in bfloat16 where that is safe."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.body(x).float()


@healthy
def mixed_precision(seed: int) -> Case:
    torch.manual_seed(seed)
    body = Mlp([64, 64, pick(seed, 32, 64)]) if pick(seed, True, False) else ConvNet(8, 2, norm=nn.BatchNorm2d)
    model = Autocast(body)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 3e-3))


class Siamese(nn.Module):
    """Two noisy views of a picture: the code of one predicts the code of the other, which sends no gradient back."""

    def __init__(self, width: int):
        super().__init__()
        norm = nn.BatchNorm1d(width), nn.BatchNorm1d(width, affine=False)
        self.encoder = nn.Sequential(nn.Linear(64, width), norm[0], nn.ReLU(), nn.Linear(width, width), norm[1])
        self.predictor = nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, width))

    def forward(self, x):
        x = x.flatten(1)
        one, two = (self.encoder(x + 0.3 * torch.randn_like(x)) for _ in range(2))
        return self.predictor(one), two.detach(), self.predictor(two), one.detach()


def _alike(output, _batch) -> torch.Tensor:
    one, other, two, another = output
    return -(F.cosine_similarity(one, other).mean() + F.cosine_similarity(two, another).mean()) / 2


@healthy
def siamese(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Siamese(pick(seed, 24, 32))
    data = [x for x, _ in digits(seed)]
    return Case(model, data, _alike, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))


SPECIMENS = (
    autoencoder,
    variational,
    gan,
    mixture_of_experts,
    finetuned,
    linear_probe,
    lora,
    mixed_precision,
    siamese,
)
