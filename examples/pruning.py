"""Which channels of a network can go, and what does that cost?

Channels are scored by how much the loss would change without them. Removing the least important ones halves the FLOPs,
and one more epoch restores the accuracy. Needs scikit-learn in addition to '.[all]'.
"""

from __future__ import annotations

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import torchhook as th

OUTPUT = Path("examples-output")
Batches = list[tuple[Tensor, Tensor]]


def network() -> nn.Sequential:
    first = [nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    second = [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10))


def train(net: nn.Module, data: Batches, epochs: int) -> None:
    net.train()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for images, labels in data * epochs:
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()


def accuracy(net: nn.Module, data: Batches) -> float:
    with torch.no_grad():
        right = [(net(images).argmax(1) == labels).float() for images, labels in data]
    return torch.cat(right).mean().item()


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads do not help such a small network
    OUTPUT.mkdir(exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = list(zip(pixels.split(64), torch.tensor(labels).split(64), strict=True))
    seen, unseen = data[:22], data[22:]
    net = network()
    train(net, seen, epochs=4)

    layers = th.prune.sensitivity(net, seen[:4], F.cross_entropy)
    print(layers)
    th.plot.sweep(layers).savefig(OUTPUT / "pruning_layers.png")
    scores = th.prune.importance(net, seen, by="taylor", loss=F.cross_entropy)
    plan = th.prune.plan(scores, flops=0.5)
    pruned = th.prune.apply(net, plan, loader=unseen, loss=F.cross_entropy)
    print(f"\n{plan}\n\n{pruned}\n")
    whole, cut = accuracy(net, unseen), accuracy(pruned.model, unseen)
    train(pruned.model, seen, epochs=1)
    gone = ", ".join(f"{row['removed']} of {row['channels']} in {row['path']!r}" for row in plan.table("list"))
    parameters, flops = (1 - change.after / change.before for change in (pruned.parameters, pruned.flops))
    print(
        f"Answer: {gone} can go, which saves {parameters:.0%} of the parameters and {flops:.0%} of the FLOPs."
        f" The accuracy is {whole:.1%} with them, {cut:.1%} without, and"
        f" {accuracy(pruned.model, unseen):.1%} after one more epoch."
    )


if __name__ == "__main__":
    main()
