"""Does a sine rise, from two of its values? A net of 2, 2 and 1 units says so. Healthy: accuracy 1.

Source: DL 41372874 (Stack Overflow). All pairs of the file there rise, so all labels are 1 here, too.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, batches, main

CAUSES = ()
SITES = ()
LOOP = False


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    now = 0.84 * torch.rand(280, 1)
    x, y = torch.cat([now, now - 0.08 - 0.03 / (now + 0.03)], 1), torch.ones(280, 1)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1), nn.Sigmoid())
    for layer in model[::2]:
        nn.init.uniform_(layer.weight, -0.05, 0.05)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters())
    return Program(model, batches(x, y, 2, seed), F.binary_cross_entropy, optimizer, 20)


@torch.no_grad()
def metric(program: Program) -> float:
    return sum(((program.model(x) > 0.5) == (y > 0.5)).sum().item() for x, y in program.data) / 280


if __name__ == "__main__":
    main(build, metric)
