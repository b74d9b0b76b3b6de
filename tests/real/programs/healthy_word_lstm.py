"""PyTorch's official example word_language_model: two LSTM layers, tied weights, SGD of rate 20, gradients clipped.

Healthy: the loss falls from 6.9 to 5.0. The words are those of Python's own help texts.
Source: TC fp_rate/workloads/word-language-model-lstm.
"""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

from real.program import Program, main

CAUSES = ()
SITES = ()
LOOP = False


class RNNModel(nn.Module):
    """Log probabilities of the next word; the state goes on from batch to batch where the batches fit."""

    def __init__(self, words: int, size: int = 200, layers: int = 2, dropout: float = 0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(words, size)
        self.rnn = nn.LSTM(size, size, layers, dropout=dropout)
        self.decoder = nn.Linear(size, words)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.hidden: tuple[torch.Tensor, ...] | None = None

    def forward(self, words):
        output, hidden = self.rnn(self.drop(self.encoder(words)), self.hidden)
        self.hidden = tuple(state.detach() for state in hidden)
        return F.log_softmax(self.decoder(self.drop(output)), dim=-1)


class ClippedSGD(torch.optim.SGD):
    """What the example's loop does by hand."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.25)
        return super().step(closure)


def nll(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(output.flatten(0, 1), target.flatten())


def text(words: int = 1000, length: int = 56000) -> torch.Tensor:
    """The commonest words have numbers; others are <unk>."""
    found = re.findall(r"[a-z]+|[.,]", " ".join(topics[name] for name in sorted(topics)).lower())[:length]
    number = {word: i + 1 for i, (word, _) in enumerate(Counter(found).most_common(words - 1))}
    return torch.tensor([number.get(word, 0) for word in found])


def build(seed: int = 0) -> Program:
    torch.manual_seed(seed)
    model = RNNModel(1000)
    columns = text().view(20, -1).t()
    data = [(columns[i : i + 35], columns[i + 1 : i + 36]) for i in range(0, len(columns) - 36, 35)]
    return Program(model, data, nll, ClippedSGD(model.parameters(), lr=20), 2)


@torch.no_grad()
def metric(program: Program) -> float:
    program.model.eval()
    return sum(program.loss(program.model(x), y).item() for x, y in program.data) / len(program.data)


if __name__ == "__main__":
    main(build, metric)
