"""A CNN for MNIST ends in a ReLU, and its loss takes the outputs for probabilities; plain logits repair it.

Where all ten outputs are zero the loss is NaN, which the asker met; here the loss stays where it is.

Test accuracy, median of six seeds: .12 → .91.
Source: DL 47352366 (Stack Overflow).
"""

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, accuracy, batches, keras_init, main

CAUSES = ("output-target-mismatch", "activation")
SITES = ("11",)
LOOP = False


def categorical_crossentropy(output, target):
    """What Keras computes from outputs that it takes for probabilities."""
    share = (output / output.sum(1, keepdim=True)).clamp(1e-7, 1 - 1e-7)
    return -(F.one_hot(target, 10) * share.log()).sum(1).mean()


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    (x, y), _ = mnist()
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 64, 1024),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(1024, 10),
        nn.Identity() if repaired else nn.ReLU(),
    )
    keras_init(model)
    for layer in (model[0], model[3], model[7]):
        nn.init.constant_(layer.bias, 0.1)
    loss = nn.CrossEntropyLoss() if repaired else categorical_crossentropy
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, eps=1e-7)
    return Program(model, batches(x, y, 50, seed), loss, optimizer, epochs=2)


def metric(program):
    _, test = mnist()
    return accuracy(program.model, *test)


if __name__ == "__main__":
    main(build, metric)
