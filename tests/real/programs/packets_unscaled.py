"""Attacks among network packets: addresses of 3e9 go in unscaled and the output is a ReLU under binary cross entropy.

Scaling and a sigmoid repair it. Accuracy: .38 → 1. Source: DL 44066044 (Stack Overflow).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, batches, main

CAUSES = ("input-scale", "output-target-mismatch")
SITES = ("", "0", "5")  # where the addresses come in, and the ReLU
LOOP = False


def packets(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """21 packets: two addresses, protocol, time to live, window and flags, port, five fields of the payload."""
    g, n = torch.Generator().manual_seed(seed), 21
    attack = (torch.arange(n) > 7).double()
    payload = (torch.rand(n, generator=g) < 0.45).double()
    coin = torch.rand(n, generator=g).double()
    columns = [
        torch.where(attack == 1, 3232235781.0, 3232235773.0 + 5 * (coin < 0.7)),
        torch.full((n,), 3232235779.0),
        torch.full((n,), 6.0),
        torch.full((n,), 128.0),
        524288.0 + 1280 * attack + 256 * torch.randint(-1, 2, (n,), generator=g),
        torch.where(torch.rand(n, generator=g) < 0.5, 502.0, 55924.0),
        12 * payload,
        payload * torch.where(attack == 1, 65280.0 * (coin < 0.4), 61.0),
        payload * (6 - attack),
        torch.zeros(n),
        payload * (206 - 105 * attack),
    ]
    return torch.stack([column.double() for column in columns], 1), attack.float()[:, None]


def clipped(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Keras's binary cross entropy."""
    return F.binary_cross_entropy(output.clamp(1e-7, 1 - 1e-7), target)


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    x, y = packets(seed)
    if repaired:
        x = (x - x.mean(0)) / x.std(0).clamp(min=1e-9)
    last = nn.Sigmoid() if repaired else nn.ReLU()
    model = nn.Sequential(nn.Linear(11, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 1), last)
    for layer in model[::2]:
        nn.init.normal_(layer.weight, std=0.05)
        nn.init.zeros_(layer.bias)
    return Program(model, batches(x.float(), y, 5, seed), clipped, torch.optim.Adam(model.parameters()), 100)


@torch.no_grad()
def metric(program: Program) -> float:
    return sum(((program.model(x) > 0.5) == (y > 0.5)).sum().item() for x, y in program.data) / 21


if __name__ == "__main__":
    main(build, metric)
