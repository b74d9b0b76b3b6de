"""Fits a line through 8 points by gradient descent; a rate of .1 diverges on inputs up to 8; .01 repairs it.

The answer takes Adam instead; a lower rate does as well.

Loss, median of six seeds: inf or NaN → .19.
Source: IPS-5, 39939881 (Stack Overflow).
"""

import torch
from torch import nn

from real.program import Program, main, mean_loss

CAUSES = ("rate", "divergence")
SITES = ()
LOOP = False


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x * self.w + self.b


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    slope, offset = torch.empty(2).uniform_(-8, 8)
    x = torch.empty(8).uniform_(-8, 8)
    y = slope * x + offset + torch.empty(8).uniform_(-1, 1)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 if repaired else 0.1)
    return Program(model, [(x, y)], nn.MSELoss(), optimizer, epochs=200 if repaired else 100)


if __name__ == "__main__":
    main(build, mean_loss)
