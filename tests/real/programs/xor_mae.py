"""Learns XOR with mean absolute error and SGD at .05, which hardly moves; squared error and Adam, longer, repair it.

The answer has Adam at .001 for 10000 epochs; the twin has .01 for 3000.

Absolute error, median of six seeds: .5 → .014.
Source: DL 31556268 (Stack Overflow).
"""

import torch
from torch import nn

from real.program import Program, keras_init, main

CAUSES = ("rate", "undertrained")
SITES = ()
LOOP = False


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    x = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    y = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    model = nn.Sequential(nn.Linear(2, 4), nn.Sigmoid(), nn.Linear(4, 1), nn.Sigmoid())
    keras_init(model)
    if repaired:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return Program(model, [(x, y)], nn.MSELoss(), optimizer, epochs=3000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.11, nesterov=True)
    return Program(model, [(x, y)], nn.L1Loss(), optimizer, epochs=1000)


@torch.no_grad()
def metric(program):
    """The mean absolute error, of both."""
    x, y = program.data[0]
    return float((program.model(x) - y).abs().mean())


if __name__ == "__main__":
    main(build, metric)
