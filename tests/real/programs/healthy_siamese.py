"""PyTorch's official example siamese_network: do two digits show the same number? A ResNet-18 looks at both of them.

Healthy: accuracy .92 to 1 on the pairs trained on. The pixels go in as bytes, as in the example; batch norm copes.
Source: TC fp_rate/workloads/siamese_network.
"""

from __future__ import annotations

import timm
import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, main

CAUSES = ()
SITES = ()
LOOP = False


class SiameseNetwork(nn.Module):
    """The probability that both pictures of a pair show the same."""

    def __init__(self):
        super().__init__()
        self.resnet = timm.create_model("resnet18", in_chans=1, num_classes=0)
        self.fc = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(inplace=True), nn.Linear(256, 1))
        self.sigmoid = nn.Sigmoid()
        for layer in (self.fc[0], self.fc[2]):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.constant_(layer.bias, 0.01)

    def forward(self, pairs):
        features = torch.cat([self.resnet(pairs[:, 0]), self.resnet(pairs[:, 1])], 1)
        return self.sigmoid(self.fc(features)).squeeze(1)


def pairs(seed: int, n: int = 320) -> tuple[torch.Tensor, torch.Tensor]:
    """Every other pair shows the same number twice."""
    (x, y), _ = mnist(seed)
    g = torch.Generator().manual_seed(seed)
    first = torch.randint(len(x), (n,), generator=g)
    same = torch.arange(n) % 2 == 0
    fits = (y[first][:, None] == y) == same[:, None]
    second = torch.multinomial(fits.float(), 1, generator=g).squeeze(1)
    return 255 * torch.stack([x[first], x[second]], 1), same.float()


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = SiameseNetwork()
    x, y = pairs(seed)
    data = list(zip(x.split(64), y.split(64), strict=True))
    return Program(model, data, F.binary_cross_entropy, torch.optim.Adadelta(model.parameters(), lr=1.0), 10)


@torch.no_grad()
def metric(program: Program) -> float:
    program.model.eval()
    return sum(((program.model(x) > 0.5) == (y > 0.5)).sum().item() for x, y in program.data) / 320


if __name__ == "__main__":
    main(build, metric)
