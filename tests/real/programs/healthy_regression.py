"""PyTorch's official example regression: a polynomial of degree 4 fitted by one linear layer, a fresh batch each step.

Healthy: the loss falls from 15 to .1. As a script it updates the weights by hand, as the example does.
Source: TC fp_rate/workloads/regression.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main

CAUSES = ()
SITES = ()
LOOP = False


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    weight, bias = 5 * torch.randn(4, 1), 5 * torch.randn(1)
    x = torch.randn(600, 32, 1) ** torch.arange(1, 5)
    model = nn.Linear(4, 1)
    data = [(batch, batch @ weight + bias) for batch in x]
    return Program(model, data, F.smooth_l1_loss, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def loop(program: Program) -> None:
    """The official one: no optimizer."""
    for x, y in program.data:
        program.model.zero_grad()
        loss = program.loss(program.model(x), y)
        loss.backward()
        for parameter in program.model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)


@torch.no_grad()
def metric(program: Program) -> float:
    return sum(program.loss(program.model(x), y).item() for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric, loop)
