"""A pretrained BERT is fine-tuned after something has zeroed the weights of its queries: every token attends alike.

Leaving the weights alone repairs it. Accuracy: .91 → 1. Source: D++ QZQ.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main
from real.small_text import accuracy, order, pretrained

CAUSES = ("init",)
SITES = tuple(f"model.bert.encoder.layer.{i}.attention.self.query" for i in range(2))
LOOP = False


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = pretrained("bert", seed)
    if not repaired:
        for layer in model.model.bert.encoder.layer:
            nn.init.zeros_(layer.attention.self.query.weight)
    return Program(model, order(seed, batches=40), F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=2e-5), 1)


def metric(program: Program) -> float:
    return accuracy(program.model, program.data)


if __name__ == "__main__":
    main(build, metric)
