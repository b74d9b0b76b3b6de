"""The asker's loss seems to rise: the sum that is printed is never set back. The training itself is healthy.

Accuracy .99. Source: BR 039 (Stack Overflow).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, batches, main

CAUSES = ()
SITES = ()
LOOP = False


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    (x, y), _ = mnist(seed)
    data = batches((x - 0.1307) / 0.3081, y, 64, seed)
    return Program(model, data, F.cross_entropy, torch.optim.Adam(model.parameters()), 10)


def loop(program: Program) -> None:
    """The asker's: what it prints grows from epoch to epoch."""
    running_loss = 0.0
    for _ in range(program.epochs):
        for x, y in program.data:
            loss = program.loss(program.model(x), y)
            program.optimizer.zero_grad()
            loss.backward()
            program.optimizer.step()
            running_loss += loss.item()
        print(f"Train Loss: {running_loss / len(program.data):.3f}")


@torch.no_grad()
def metric(program: Program) -> float:
    return sum((program.model(x).argmax(1) == y).sum().item() for x, y in program.data) / 1500


if __name__ == "__main__":
    main(build, metric, loop)
