"""PyTorch's official example mnist: two convolutions, dropout, Adadelta of rate 1. Healthy: accuracy .98.

Source: TC fp_rate/workloads/mnist.
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


class Net(nn.Module):
    """Returns log probabilities."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = Net()
    (x, y), _ = mnist(seed)
    data = batches((x - 0.1307) / 0.3081, y, 64, seed)
    return Program(model, data, F.nll_loss, torch.optim.Adadelta(model.parameters(), lr=1.0), 3)


def loop(program: Program) -> None:
    """The official one: the rate falls by .7 after each epoch."""
    scheduler = torch.optim.lr_scheduler.StepLR(program.optimizer, step_size=1, gamma=0.7)
    for _ in range(program.epochs):
        program.model.train()
        for x, y in program.data:
            program.optimizer.zero_grad()
            loss = program.loss(program.model(x), y)
            loss.backward()
            program.optimizer.step()
        scheduler.step()


@torch.no_grad()
def metric(program: Program) -> float:
    program.model.eval()
    return sum((program.model(x).argmax(1) == y).sum().item() for x, y in program.data) / 1500


if __name__ == "__main__":
    main(build, metric, loop)
