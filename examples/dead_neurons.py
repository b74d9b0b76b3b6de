"""Which neurons are dead, and what killed them?

A unit of a ReLU that is never positive passes no gradient, so it never recovers. Here the same network learns
handwritten digits with two learning rates. `diagnose` tries each training on a copy; then the dead units are counted.
Needs scikit-learn in addition to '.[all]'.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")
STEPS = 120


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return list(zip(pixels.split(64), torch.tensor(labels).split(64), strict=True))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> float:
    for step in range(STEPS):
        images, labels = data[step % len(data)]
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def dead_units(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> dict[str, tuple[int, int]]:
    """For each ReLU, how many of its units are zero at every position of every image, and how many it has."""
    with th.measure(net, nn.ReLU, by="channel") as stats, torch.no_grad():
        for images, _ in data:
            net(images)
    active = {path: stats[path].channels.active_fraction for path in ("1", "5")}
    return {path: (int((units == 0).sum()), len(units)) for path, units in active.items()}


def main() -> None:
    torch.set_num_threads(1)  # more threads do not help such a small network
    OUTPUT.mkdir(exist_ok=True)
    data, answer = batches(), []
    for rate in (0.05, 1.0):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
        report = th.diagnose(net, data, F.cross_entropy, optimizer, steps=STEPS)
        print(f"--- learning rate {rate}\n{report}\n")
        th.render.save(report, OUTPUT / f"dead_neurons_{rate}.html")
        loss, dead = train(net, optimizer, data), dead_units(net, data)
        counts = " and ".join(f"{few} of {all_} units of '{path}'" for path, (few, all_) in dead.items())
        cause = "nothing is wrong" if report.ok else report.findings[0].message
        answer.append(f"with a learning rate of {rate}, {counts} are dead, the loss ends at {loss:.2f} ({cause})")
    print(f"Answer: {'; '.join(answer)}.")


if __name__ == "__main__":
    main()
