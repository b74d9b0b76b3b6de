"""A BERT whose layer norms have a gain of zero: nothing of the input comes through. A gain of one repairs it.

Accuracy: .51 → 1. Source: D++ NZG.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main
from real.small_text import Bert, accuracy, order

CAUSES = ("init", "no-gradient")
SITES = (
    "model.bert.embeddings.LayerNorm",
    *(f"model.bert.encoder.layer.{i}.{part}.LayerNorm" for i in range(2) for part in ("attention.output", "output")),
)
LOOP = False


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = Bert()
    if not repaired:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.weight)
    return Program(model, order(seed), F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3), 8)


def metric(program: Program) -> float:
    return accuracy(program.model, program.data)


if __name__ == "__main__":
    main(build, metric)
