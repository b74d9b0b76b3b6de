"""FSDP2: the model is used once between `fully_shard` and the optimizer, which so gets parameters that are not trained.

Making the optimizer first repairs it. Mean squared error: 1.5 → .05. Source: pytorch #149205.
"""

from __future__ import annotations

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from real.ranks import two

CAUSES = ("loop", "frozen")  # the optimizer has other parameters than the model
SITES = ()
LOOP = True


def train(repaired: bool = False, seed: int = 0) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    torch.manual_seed(100 * seed + distributed.get_rank())
    x = torch.randn(100, 16, 8)
    y = x.square().mean(2, keepdim=True)
    if not repaired:
        with torch.no_grad():
            model(x[0])  # to see how large the loss is at first
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for batch, target in zip(x, y, strict=True):
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch), target)
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return sum(F.mse_loss(model(batch), target).item() for batch, target in zip(x, y, strict=True)) / len(x)


if __name__ == "__main__":
    two(train)
