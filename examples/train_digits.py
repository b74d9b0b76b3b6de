"""An ordinary training script that does not know torchhook: a small CNN on handwritten digits.

    torchhook run examples/train_digits.py
    torchhook run examples/train_digits.py --slip

With `--slip` the learning rate jumps to a hundred times its value at step 240, as if a schedule had lost its decimal
point.
Needs scikit-learn in addition to '.[all]'.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

STEPS, SLIP_AT = 400, 240


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.relu2 = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.conv1(x))
        x = self.pool(self.relu2(self.conv2(x)))
        return self.head(x.flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slip", action="store_true", help="multiply the learning rate by 100 at step 240")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help such a small network
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        if options.slip and step == SLIP_AT:
            optimizer.param_groups[0]["lr"] *= 100
        batch = torch.randint(1500, (64,))
        loss = F.cross_entropy(net(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.3f}")
    with torch.no_grad():
        right = (net(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"accuracy on {len(images) - 1500} unseen digits: {right:.1%}")


if __name__ == "__main__":
    main()
