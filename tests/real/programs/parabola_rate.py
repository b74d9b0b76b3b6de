"""Fits y = 5x² + noise with SGD; a rate of .1 diverges on targets up to 125; .001 repairs it.

Standardised targets alone repair it, too (26 to 42 in these units), which is why `target-scale` counts.

Loss, median of six seeds: 1404 → 116.
Source: DL 48934338 (Stack Overflow).
"""

import torch
from torch import nn

from real.program import Program, batches, keras_init, main, mean_loss

CAUSES = ("rate", "divergence", "target-scale")
SITES = ()
LOOP = False


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    x = torch.arange(0, 5, 0.1).reshape(-1, 1)
    y = 5 * x**2 + torch.randn(50, 1) ** 3
    model = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 30), nn.ReLU(), nn.Linear(30, 1))
    keras_init(model)
    nn.init.uniform_(model[2].weight, -0.05, 0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001 if repaired else 0.1)
    return Program(model, batches(x, y, 32, seed), nn.MSELoss(), optimizer, epochs=1000)


if __name__ == "__main__":
    main(build, mean_loss)
