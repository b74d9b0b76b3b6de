"""y = x⁴ for x from −100 to 100: targets up to 1e8 that the net cannot climb to; standardising x and y repairs it.

Unexplained share of the variance: 1.56 → .004. Source: DL 52800582 (Stack Overflow).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, keras_init, main

CAUSES = ("target-scale", "input-scale")
SITES = ()
LOOP = False


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    x = torch.arange(-100, 100, 0.5)[:, None]
    y = x**4
    if repaired:
        x, y = ((t - t.mean()) / t.std() for t in (x, y))
    model = nn.Sequential(nn.Linear(1, 50), nn.Sigmoid(), nn.Linear(50, 50), nn.ELU(), nn.Linear(50, 1))
    keras_init(model)
    return Program(model, [(x, y)], F.mse_loss, torch.optim.Adam(model.parameters()), 1000)


@torch.no_grad()
def metric(program: Program) -> float:
    (x, y), *_ = program.data
    return (F.mse_loss(program.model(x), y) / y.var()).item()


if __name__ == "__main__":
    main(build, metric)
