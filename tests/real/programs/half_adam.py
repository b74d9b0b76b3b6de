"""A convolution trained in float16 by Adam, whose eps of 1e-8 is zero there: 0 / 0 in the first step. 1e-4 repairs it.

Mean squared error: NaN → .007 (.08 before training). Source: IPS-10 42064941 (Stack Overflow). The asker fed zeros and
minimised the mean; here the same layer learns what another one says, so that the repaired program can learn.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main

CAUSES = ("precision",)
SITES = ()
LOOP = False


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    teacher, model = (nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()) for _ in range(2))
    x = torch.rand(32, 4, 3, 16, 16)
    with torch.no_grad():
        data = [(images.half(), teacher(images).half()) for images in x]
    model.half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-4 if repaired else 1e-8)
    return Program(model, data, F.mse_loss, optimizer, 15)


@torch.no_grad()
def metric(program: Program) -> float:
    model = program.model.float()
    return sum(F.mse_loss(model(x.float()), y.float()).item() for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric)
