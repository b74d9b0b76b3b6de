"""Two classes from 22 features; log_softmax over the one output unit is always 0; sigmoid repairs it.

Loss, median of six seeds: 50 → .37.
Source: BR 042 (mehilshah/Bug_Reproducibility_DL_Bugs).
"""

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main, mean_loss

CAUSES = ("no-gradient", "output-target-mismatch", "activation")
SITES = ("fc2", "")
LOOP = False


class Classifier(nn.Module):
    def __init__(self, repaired):
        super().__init__()
        self.fc1 = nn.Linear(22, 10)
        self.fc2 = nn.Linear(10, 1)
        self.repaired = repaired

    def forward(self, x):
        x = F.relu(self.fc1(x.view(x.shape[0], -1)))
        if self.repaired:
            return torch.sigmoid(self.fc2(x))
        return F.log_softmax(self.fc2(x), dim=1)


def build(repaired=False, seed=0):
    torch.manual_seed(seed)
    y = torch.randint(2, (4000, 1)).float()
    x = 0.5 * torch.rand(4000, 22) + 0.5 * y
    model = Classifier(repaired)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    return Program(model, [(x, y)], nn.BCELoss(), optimizer, epochs=2000)


if __name__ == "__main__":
    main(build, mean_loss)
