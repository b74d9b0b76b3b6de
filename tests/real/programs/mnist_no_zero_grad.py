"""A CNN for MNIST; `zero_grad` is never called, so that gradients add up; calling it repairs it.

Test accuracy, median of six seeds: .75 → .95.
Source: TC stackoverflow-60335387 (OrderLab/TrainCheck-Evaluation-Workloads).
"""

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, accuracy, batches, main

CAUSES = ("loop",)
SITES = ()
LOOP = True


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(self.conv2(x), 2)
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return self.fc2(x)


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    (x, y), _ = mnist()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    return Program(model, batches((x - 0.1307) / 0.3081, y, 30, seed), nn.CrossEntropyLoss(), optimizer, epochs=3)


def loop(program, repaired=False):
    model, data, loss, optimizer, epochs = program
    model.train()
    for _ in range(epochs):
        for x, y in data:
            if repaired:
                optimizer.zero_grad()
            value = loss(model(x), y)
            value.backward()
            optimizer.step()


def metric(program):
    _, (x, y) = mnist()
    return accuracy(program.model, (x - 0.1307) / 0.3081, y)


if __name__ == "__main__":
    main(build, metric, loop)
