"""PyTorch's official example vae: a variational autoencoder with summed losses.

Healthy: the loss falls from 550 to 120 a picture. Source: TC fp_rate/workloads/vae.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, main

CAUSES = ()
SITES = ()
LOOP = False


class VAE(nn.Module):
    """Returns the picture, the mean and the log variance."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21, self.fc22 = nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x):
        hidden = F.relu(self.fc1(x.view(-1, 784)))
        mean, logvar = self.fc21(hidden), self.fc22(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(code)))), mean, logvar


def evidence(output: tuple[torch.Tensor, ...], images: torch.Tensor) -> torch.Tensor:
    picture, mean, logvar = output
    apart = F.binary_cross_entropy(picture, images.view(-1, 784), reduction="sum")
    return apart - 0.5 * torch.sum(1 + logvar - mean.pow(2) - logvar.exp())


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = VAE()
    (x, _), _ = mnist(seed)
    data = [(images, images) for images in x.split(128)]
    return Program(model, data, evidence, torch.optim.Adam(model.parameters(), lr=1e-3), 20)


@torch.no_grad()
def metric(program: Program) -> float:
    return sum(program.loss(program.model(x), y).item() for x, y in program.data) / 1500


if __name__ == "__main__":
    main(build, metric)
