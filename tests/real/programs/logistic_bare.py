"""Logistic regression with bare tensors; the log of a sigmoid that has reached 0 or 1 is NaN; logits repair it.

GRIST searches for inputs on which it happens; here they are centred and four times as large.

Accuracy, median of six seeds: .5 (NaN) → 1.
Source: GR ID_26 (Jacob-yen/GRIST).
"""

import torch
from torch.nn import functional as F

from real.program import script

CAUSES = ("nonfinite", "output-target-mismatch")
SITES = ()
LOOP = False


def train(repaired=False, seed=0):
    torch.manual_seed(seed)
    x = torch.tensor([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0], [4.0, 3.0], [5.0, 3.0], [6.0, 2.0]])
    x = 4 * (x - x.mean(0)) + 0.1 * torch.randn_like(x)
    y = torch.tensor([[0.0], [0.0], [0.0], [1.0], [1.0], [1.0]])
    w = torch.zeros((2, 1), requires_grad=True)
    b = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([w, b], lr=1)
    for _ in range(1000):
        z = x.matmul(w) + b
        if repaired:
            cost = F.binary_cross_entropy_with_logits(z, y)
        else:
            hypothesis = torch.sigmoid(z)
            cost = -(y * torch.log(hypothesis) + (1 - y) * torch.log(1 - hypothesis)).mean()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
    return float(((x.matmul(w) + b > 0) == (y > 0.5)).float().mean())


if __name__ == "__main__":
    script(train)
