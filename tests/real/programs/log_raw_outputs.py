"""An MLP for MNIST whose loss takes the log of raw outputs, which may be negative: NaN; BCE on logits repairs it.

The gradients stay finite: the derivative of log x is 1 / x also where the log is NaN.

Test accuracy, median of six seeds: .08 → .87.
Source: IPS-7, 35078027 (Stack Overflow).
"""

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, accuracy, batches, main

CAUSES = ("nonfinite", "output-target-mismatch")
SITES = ("3", "")
LOOP = False


def by_hand(output, target):
    return torch.sum(-target * torch.log(output) - (1 - target) * torch.log(1 - output), 1).mean()


def stable(output, target):
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").sum(1).mean()


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    (x, y), _ = mnist()
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 512, bias=False), nn.Sigmoid(), nn.Linear(512, 10, bias=False))
    nn.init.normal_(model[1].weight)
    nn.init.normal_(model[3].weight)
    loss = stable if repaired else by_hand
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Program(model, batches(x, F.one_hot(y, 10).float(), 100, seed), loss, optimizer, epochs=20)


def metric(program):
    _, test = mnist()
    return accuracy(program.model, *test)


if __name__ == "__main__":
    main(build, metric)
