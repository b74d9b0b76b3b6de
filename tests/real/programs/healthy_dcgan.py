"""PyTorch's official example dcgan: generator and discriminator of convolutions, each with its Adam (2e-4, beta .5).

Healthy: the pictures' mean is within .35 to .58 of the real ones' (.83 before training). Pictures of 32
instead of 64 pixels, a quarter of the channels. Source: TC fp_rate/workloads/dcgan.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import script

CAUSES = ()
SITES = ()
LOOP = True  # two networks and two optimizers
EPOCHS = 12


def weights_init(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def generator(width: int = 16) -> nn.Sequential:
    layers, channels = [], 100
    for i, wide in enumerate((4 * width, 2 * width, width)):
        stride, padding = (2, 1) if i else (1, 0)
        layers += [
            nn.ConvTranspose2d(channels, wide, 4, stride, padding, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU(True),
        ]
        channels = wide
    return nn.Sequential(*layers, nn.ConvTranspose2d(channels, 1, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width: int = 16) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for wide in (2 * width, 4 * width):
        layers += [
            nn.Conv2d(wide // 2, wide, 4, 2, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 4, 1, 0, bias=False), nn.Sigmoid(), nn.Flatten(0))


def train(repaired: bool = False, seed: int = 0) -> float:
    torch.manual_seed(seed)
    (x, _), _ = mnist(seed)
    data = (2 * F.pad(x, (2, 2, 2, 2)) - 1).split(64)[:23]
    net_g, net_d = generator().apply(weights_init), discriminator().apply(weights_init)
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCELoss()
    for _ in range(EPOCHS):
        for real in data:
            net_d.zero_grad()
            ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
            criterion(net_d(real), ones).backward()
            fake = net_g(torch.randn(len(real), 100, 1, 1))
            criterion(net_d(fake.detach()), zeros).backward()
            optimizer_d.step()
            net_g.zero_grad()
            criterion(net_d(fake), ones).backward()
            optimizer_g.step()
    with torch.no_grad():
        return (net_g(torch.randn(256, 100, 1, 1)).mean(0) - torch.cat(data).mean(0)).abs().mean().item()


if __name__ == "__main__":
    script(train)
