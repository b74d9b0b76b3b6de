"""A fine-tuning of EfficientNet that freezes all but the norms and then the new head, which is all the optimizer has.

Leaving the head trainable repairs it. Accuracy: .10 → .55.
Source: TC pytorch-forum-84911; a small EfficientNet and digits instead of B0 and CIFAR-100.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.data import mnist
from real.program import Program, batches, main

CAUSES = ("frozen",)
SITES = ("_fc",)
LOOP = False


class Block(nn.Module):
    """Widens, filters each channel, narrows."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        wide = 4 * inputs
        self.expand, self.bn0 = nn.Conv2d(inputs, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        self.project, self.bn2 = nn.Conv2d(wide, outputs, 1, bias=False), nn.BatchNorm2d(outputs)

    def forward(self, x):
        out = F.silu(self.bn0(self.expand(x)))
        out = self.bn2(self.project(F.silu(self.bn1(self.depthwise(out)))))
        return out + x if out.shape == x.shape else out


class EfficientNet(nn.Module):
    """The stem, blocks, the head's convolution, and a classifier."""

    def __init__(self, classes: int):
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(1, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 24, 2), Block(24, 24, 1))
        self.head, self.bn1 = nn.Conv2d(24, 128, 1, bias=False), nn.BatchNorm2d(128)
        self._fc = nn.Linear(128, classes)

    def forward(self, x):
        x = self.blocks(F.silu(self.bn0(self.stem(x))))
        x = F.silu(self.bn1(self.head(x)))
        return self._fc(F.dropout(x.mean((2, 3)), 0.2, self.training))


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = EfficientNet(10)
    optimizer = torch.optim.Adam(model._fc.parameters(), lr=1e-3)
    for name, parameter in model.named_parameters():
        if "bn" not in name:
            parameter.requires_grad = False
    for parameter in model._fc.parameters():
        parameter.requires_grad = repaired
    (x, y), _ = mnist(seed)
    return Program(model, batches((x - 0.16) / 0.33, y, 64, seed), F.cross_entropy, optimizer, 10)


@torch.no_grad()
def metric(program: Program) -> float:
    program.model.eval()
    return sum((program.model(x).argmax(1) == y).sum().item() for x, y in program.data) / 1500


if __name__ == "__main__":
    main(build, metric)
