"""Three kinds of iris, unscaled, one sample a step; SGD at .1 is too fast for that; scaled data and .03 repair it.

Its class overrides `nn.Module.train`. Scaling alone repairs it, too (.97 to .99), which is why `input-scale` counts;
the rate alone does so on some seeds only (.38 to .93).

Accuracy, median of six seeds: .36 → .97.
Source: BR 077 (mehilshah/Bug_Reproducibility_DL_Bugs).
"""

import torch
from sklearn.datasets import load_iris
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn

from real.program import Program, main

CAUSES = ("rate", "divergence", "input-scale")
SITES = ()
LOOP = False


class Classifier(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
        self.optimiser = torch.optim.SGD(self.parameters(), lr=rate)
        self.loss_fn = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.model(x)

    def train(self, x, y):
        loss = self.loss_fn(self.forward(x), y)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    x, y = load_iris(return_X_y=True)
    if repaired:
        x = StandardScaler().fit_transform(x)
    x, _, y, _ = train_test_split(x, y, test_size=0.4, random_state=seed)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    model = Classifier(0.03 if repaired else 0.1)
    return Program(model, list(zip(x, y, strict=True)), model.loss_fn, model.optimiser, epochs=10)


def loop(program, repaired=False):
    for _ in range(program.epochs):
        for x, y in program.data:
            program.model.train(x, y)


def metric(program):
    return sum(int(program.model(x).argmax() == y) for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric, loop)
