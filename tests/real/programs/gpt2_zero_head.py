"""A pretrained GPT-2 is fine-tuned after its output projection has been set to zeros. Leaving it alone repairs it.

Cross entropy: 2.84 → .77. Source: D++ ORI.
"""

from __future__ import annotations

import torch
from torch import nn

from real.program import Program, main
from real.small_text import chain, next_token, pretrained

CAUSES = ("init",)
SITES = ("model.lm_head",)
LOOP = False


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = pretrained("gpt2", seed)
    if not repaired:
        nn.init.zeros_(model.model.lm_head.weight)
    return Program(model, chain(seed), next_token, torch.optim.AdamW(model.parameters(), lr=5e-5), 2)


@torch.no_grad()
def metric(program: Program) -> float:
    program.model.eval()
    return sum(program.loss(program.model(x), y).item() for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric)
