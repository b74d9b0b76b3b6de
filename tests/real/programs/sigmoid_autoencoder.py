"""An autoencoder of MNIST whose sigmoids let no gradient through: it paints the mean digit. ReLU repairs it.

Binary cross entropy: .208 → .145. Source: BR 067 (Stack Overflow; "loss is stuck at .23").
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, main

CAUSES = ("activation", "no-gradient")
SITES = ("0.1", "0.2", "0.3", "0.4", "0.5", "1.0", "1.1", "1.2", "1.3")  # the sigmoids, and the layers they starve
LOOP = False


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    act = nn.ReLU if repaired else nn.Sigmoid
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), act(), nn.Linear(256, 64), act(), nn.Linear(64, 32))
    decoder = nn.Sequential(nn.Linear(32, 64), act(), nn.Linear(64, 256), act(), nn.Linear(256, 784), nn.Sigmoid())
    model = nn.Sequential(encoder, decoder)
    (x, _), _ = mnist(seed)
    data = [(images, images.flatten(1)) for images in x.split(64)]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=5e-5)
    return Program(model, data, F.binary_cross_entropy, optimizer, 20)


@torch.no_grad()
def metric(program: Program) -> float:
    return sum(program.loss(program.model(x), y).item() for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric)
