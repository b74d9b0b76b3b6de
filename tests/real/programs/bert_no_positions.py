"""A BERT that leaves out its position embeddings cannot tell which of two words comes first. Adding them repairs it.

Accuracy: .63 → 1. Source: D++ POE.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main
from real.small_text import Bert, accuracy, order

CAUSES = ("unused-part", "no-gradient")
SITES = ("model.bert.embeddings.position_embeddings", "model.bert.embeddings")
LOOP = False


class Omitted(nn.Embedding):
    """Adds nothing, in the right shape."""

    def forward(self, positions):
        return torch.zeros_like(super().forward(positions))


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = Bert()
    if not repaired:
        model.model.bert.embeddings.position_embeddings.__class__ = Omitted
    return Program(model, order(seed), F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3), 8)


def metric(program: Program) -> float:
    return accuracy(program.model, program.data)


if __name__ == "__main__":
    main(build, metric)
