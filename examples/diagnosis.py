"""Why does it not learn? Two networks on handwritten digits: one healthy, one with a mistake in it.

Prints the diagnosis of both and writes a page for the browser.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    return [(images[part], labels[part]) for part in order.split(64)[:-1]]


def main() -> None:
    torch.manual_seed(0)
    data, healthy, sick = batches(), network(), network()
    nn.init.constant_(sick[7].bias, -4)  # the mistake: hardly a unit of this layer is ever positive
    for name, model in (("healthy", healthy), ("with a mistake", sick)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        report = th.diagnose(model, data, F.cross_entropy, optimizer, steps=80)
        print(f"--- {name}: the loss went from {report.losses[0]:.2f} to {report.losses[79]:.2f}")
        th.render.terminal(report)
    page = Path("demo-output", "report.html")
    page.parent.mkdir(exist_ok=True)
    th.render.save(report, page)
    print(f"\nopen {page} in a browser, and try th.diagnose(model, loader, loss) on a model of your own")


if __name__ == "__main__":
    main()
