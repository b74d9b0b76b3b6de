"""What tests/rules/origin/test_origin_files.py saves, in a module that a fresh process can import."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    x: torch.Tensor
    scale: float = 1.0

    def __post_init__(self):
        BUILT.append(self.scale)


BUILT: list[float] = []


class Sick(nn.Module):
    """Takes all kinds of arguments, applies dropout, divides by zero."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, batch, pair, *, options):
        h = F.dropout(self.norm(self.fc(batch.x)), 0.5) * batch.scale + pair.y["z"].abs().to(options["dtype"]).repeat(
            1, 2
        )
        h = h + pair.y[3] - pair.y["3"].mT
        LATEST.append(h.detach().clone())
        return Pair(h / self.zero, None)  # sick


LATEST: list[torch.Tensor] = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.sick = Sick()

    def forward(self, x):
        h = self.first(x)
        z = torch.complex(h.double(), h.double()).conj()[:, ::2]
        pair = Pair(h.mT, {"z": z, 3: h + 1, "3": h.mT, 4: None, "w": [h.expand(2, *h.shape)]})
        return self.sick(Batch(h, 2.5), pair, options={"dtype": torch.float32, "inf": float("inf"), "on": True})
