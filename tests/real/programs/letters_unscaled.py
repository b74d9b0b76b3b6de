"""Two words of three letters told apart: the letters' codes (65 to 70) go in as they are; standardising repairs it.

Cross entropy at the end: .69 → .00 to .18. Source: DL 39525358 (Stack Overflow).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, batches, main

CAUSES = ("input-scale",)
SITES = ()
LOOP = False


def letters(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """13 rows, one letter in eight exchanged between the words."""
    g = torch.Generator().manual_seed(seed)
    word = torch.arange(13) % 2
    own = (torch.rand(13, 3, generator=g) > 0.125).long()
    from_word = torch.where(own == 1, word[:, None], 1 - word[:, None])
    return 65.0 + torch.arange(3) + 3 * from_word, word.float()[:, None]


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    x, y = letters(seed)
    if repaired:
        x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(3, 12), nn.ReLU(), nn.Linear(12, 3), nn.ReLU(), nn.Linear(3, 1), nn.Sigmoid())
    for layer in model[::2]:
        nn.init.uniform_(layer.weight, -0.05, 0.05)
        nn.init.zeros_(layer.bias)
    optimizer = torch.optim.Adam(model.parameters())
    return Program(model, batches(x, y, 1, seed), F.binary_cross_entropy, optimizer, 150)


@torch.no_grad()
def metric(program: Program) -> float:
    return sum(program.loss(program.model(x), y).item() for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric)
