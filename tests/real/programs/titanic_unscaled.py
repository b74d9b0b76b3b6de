"""Who survives the Titanic: label-encoded names and tickets (0 to 1300) go unscaled into the net; scaling repairs it.

Accuracy on the passengers trained on: .67 → .83. Source: DL 31627380 (Stack Overflow); passengers are made up.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, batches, keras_init, main

CAUSES = ("input-scale",)
SITES = ()
LOOP = False


def passengers(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Class, name, sex, age, siblings, parents, ticket, fare, cabin, port; and who survived."""
    g, n = torch.Generator().manual_seed(seed), 891
    rank = torch.multinomial(torch.tensor([0.24, 0.21, 0.55]), n, True, generator=g).float()
    sex = (torch.rand(n, generator=g) < 0.65).float()  # 1: male
    age = (29.7 + 13 * torch.randn(n, generator=g)).clamp(0.4, 80)
    siblings, parents = (torch.poisson(torch.full((n,), rate), generator=g) for rate in (0.52, 0.38))
    fare = (4.4 - 1.0 * rank + 0.5 * torch.randn(n, generator=g)).exp().clamp(0, 512)
    name, ticket = torch.randperm(1307, generator=g)[:n].float(), torch.randint(929, (n,), generator=g).float()
    cabin = torch.where(rank == 0, torch.randint(187, (n,), generator=g), 186).float()
    port = torch.multinomial(torch.tensor([0.19, 0.09, 0.72]), n, True, generator=g).float()
    score = 2.3 - 3.0 * sex - 0.9 * rank - 0.025 * (age - 30) - 0.3 * siblings
    survived = (torch.rand(n, generator=g) < score.sigmoid()).long()
    return torch.stack([rank, name, sex, age, siblings, parents, ticket, fare, cabin, port], 1), survived


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    x, y = passengers(seed)
    if repaired:
        x = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(10, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 2))
    keras_init(model)
    return Program(model, batches(x[:712], y[:712], 4, seed), F.cross_entropy, torch.optim.Adam(model.parameters()), 10)


@torch.no_grad()
def metric(program: Program) -> float:
    program.model.eval()
    return sum((program.model(x).argmax(1) == y).sum().item() for x, y in program.data) / 712


if __name__ == "__main__":
    main(build, metric)
