"""Tensor-parallel ranks that clip by the norm of their own shard: the layer norms, which all of them hold, drift apart.

Clipping by the norm of the whole model repairs it. Largest difference of a layer norm between the ranks:
.007 → 0. Source: TC deepspeed-1801 (the training of BLOOM).
"""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.nn import functional as F

from real.ranks import apart, two

CAUSES = ("rank-difference",)
SITES = ("0.norm", "1.norm", "2.norm", "3")  # what every rank holds: the layer norms and the head
LOOP = True


class Together(torch.autograd.Function):
    """The input of a parallel part: its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient)
        return gradient


class Summed(torch.autograd.Function):
    """The output of a parallel part: the sum of the ranks' outputs."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        distributed.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class ParallelMlp(nn.Module):
    """A residual block; each rank has half of the hidden units."""

    def __init__(self, size: int):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.column, self.row = nn.Linear(size, 2 * size), nn.Linear(2 * size, size, bias=False)

    def forward(self, x):
        return x + Summed.apply(self.row(F.gelu(self.column(Together.apply(self.norm(x))))))


def clip(model: nn.Sequential, limit: float, repaired: bool) -> None:
    gradients = [(name, p.grad) for name, p in model.named_parameters()]
    split = sum(g.square().sum() for name, g in gradients if "column" in name or "row" in name)
    shared = sum(g.square().sum() for name, g in gradients if "column" not in name and "row" not in name)
    if repaired:
        distributed.all_reduce(split)
    factor = (limit / (split + shared).sqrt()).clamp(max=1.0)
    for _, gradient in gradients:
        gradient.mul_(factor)


def train(repaired: bool = False, seed: int = 0) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(*(ParallelMlp(32) for _ in range(3)), nn.Linear(32, 8))
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    x = torch.randn(150, 64, 32)
    torch.manual_seed(100 * seed + distributed.get_rank())
    for block in model[:3]:  # the ranks' shards are different
        block.column.reset_parameters()
        block.row.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in x:
        with torch.no_grad():
            target = 10 * teacher(batch)
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch), target)
        loss.backward()
        clip(model, 1.0, repaired)
        optimizer.step()
    return apart([p for name, p in model.named_parameters() if "norm" in name])


if __name__ == "__main__":
    two(train)
