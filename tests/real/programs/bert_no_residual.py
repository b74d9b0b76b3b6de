"""A BERT whose layers do not add their input to their output: all tokens become alike. Adding it repairs it.

Accuracy: .51 → 1. Source: D++ RRS.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers.models.bert.modeling_bert import BertOutput, BertSelfOutput

from real.program import Program, main
from real.small_text import Bert, accuracy, order

CAUSES = ("other", "no-gradient")  # the closed list has no word for a missing path
SITES = tuple(
    f"model.bert.encoder.layer.{i}.{part}{end}"
    for i in range(2) for part in ("attention.output", "output") for end in ("", ".LayerNorm", ".dense")
)  # fmt: skip
LOOP = False


class NoSelfResidual(BertSelfOutput):
    """Forgets the input of the attention."""

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)))


class NoResidual(BertOutput):
    """Forgets the input of the feed-forward part."""

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)))


def build(repaired: bool = False, seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = Bert()
    if not repaired:
        for layer in model.model.bert.encoder.layer:
            layer.attention.output.__class__ = NoSelfResidual
            layer.output.__class__ = NoResidual
    return Program(model, order(seed), F.cross_entropy, torch.optim.AdamW(model.parameters(), lr=1e-3), 8)


def metric(program: Program) -> float:
    return accuracy(program.model, program.data)


if __name__ == "__main__":
    main(build, metric)
