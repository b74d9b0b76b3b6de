"""A CNN for MNIST; the labels are divided by 255 along with the pixels, so that all become 0; leaving them repairs it.

Test accuracy, median of six seeds: .09 → .94.
Source: DL 59325381 (Stack Overflow).
"""

import torch
from torch import nn

from real.data import mnist
from real.program import Program, accuracy, batches, keras_init, main

CAUSES = ("labels",)
SITES = ()
LOOP = False


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    (x, y), _ = mnist()
    if not repaired:
        y = (y / 255).long()
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )
    keras_init(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7)
    return Program(model, batches(x, y, 32, seed), nn.CrossEntropyLoss(), optimizer, epochs=3)


def metric(program):
    _, test = mnist()
    return accuracy(program.model, *test)


if __name__ == "__main__":
    main(build, metric)
