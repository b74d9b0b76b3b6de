"""Tells rows of ones from rows of zeros; a softmax over the one output unit is always 1; sigmoid repairs it.

Loss, median of six seeds: 50 → 9e-10.
Source: DL 31880720 (Stack Overflow).
"""

import torch
from torch import nn

from real.program import Program, batches, keras_init, main, mean_loss

CAUSES = ("no-gradient", "output-target-mismatch", "activation")
SITES = ("7",)
LOOP = False


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    x = torch.cat([torch.ones(1000, 128), torch.zeros(1000, 128)])
    y = torch.cat([torch.ones(1000, 1), torch.zeros(1000, 1)])
    model = nn.Sequential(
        nn.Linear(128, 50),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(50, 50),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(50, 1),
        nn.Sigmoid() if repaired else nn.Softmax(dim=1),
    )
    keras_init(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001, alpha=0.9, eps=1e-7)
    return Program(model, batches(x, y, 1, seed), nn.BCELoss(), optimizer, epochs=1)


if __name__ == "__main__":
    main(build, mean_loss)
