"""Healthy trainings on sequences: letters, words, waves and the rows of pictures."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from zoo.case import Case, backward, healthy, pick
from zoo.nets import Gpt, Recurrent
from zoo.tasks import LETTERS, bags, digits, text, waves


@healthy
def gpt(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Gpt(LETTERS, width=pick(seed, 24, 32), depth=pick(seed, 2, 3), heads=pick(seed, 2, 4))
    data = [{"ids": ids, "labels": ids} for ids in text(seed)]
    return Case(model, data, None, torch.optim.AdamW(model.parameters(), 5e-3), steps=80)


@healthy
def lstm(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Recurrent(8, width=pick(seed, 24, 32), num_layers=pick(seed, 1, 2))
    return Case(model, digits(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2))


@healthy
def rnn_clipped(seed: int) -> Case:
    """A plain tanh RNN whose gradients are clipped."""
    torch.manual_seed(seed)
    model = Recurrent(2, width=pick(seed, 24, 32), classes=4, kind=nn.RNN)
    case = Case(
        model, waves(seed, length=16, width=2), F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), steps=100
    )

    def loop(watch) -> None:
        for step in range(case.steps):
            loss = backward(case, case.data[step % len(case.data)])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            case.optimizer.step()
            watch.step(loss)

    case.loop = loop
    return case


class Reader(nn.Module):
    """Embeds words, reads them both ways, and averages over those that are not padding."""

    def __init__(self, words: int = 20, width: int = 16, classes: int = 4):
        super().__init__()
        self.words = nn.Embedding(words + 1, width, padding_idx=0)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, ids):
        mask = (ids != 0).unsqueeze(2)
        out, _ = self.gru(self.words(ids))
        return self.head((out * mask).sum(1) / mask.sum(1))


@healthy
def gru_padded(seed: int) -> Case:
    torch.manual_seed(seed)
    model = Reader(width=pick(seed, 12, 16))
    return Case(model, bags(seed), F.cross_entropy, torch.optim.Adam(model.parameters(), 5e-3))


@healthy
def embedding_bag(seed: int) -> Case:
    torch.manual_seed(seed)
    width = pick(seed, 8, 16, 32)
    bag = nn.EmbeddingBag(41, width, mode="mean", padding_idx=0)
    model = nn.Sequential(bag, nn.LayerNorm(width), nn.Linear(width, 4))
    return Case(model, bags(seed, words=40), F.cross_entropy, torch.optim.Adagrad(model.parameters(), 0.05))


SPECIMENS = (gpt, lstm, rnn_clipped, gru_padded, embedding_bag)
