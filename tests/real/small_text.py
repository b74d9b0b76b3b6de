"""Small tasks for transformers, a BERT and a GPT-2 made for them from configs, and both of them pretrained.

*Order*: do the markers 1 and 2 stand in this order among other tokens? Sentences have different lengths; 0 is padding.
*Chain*: in nine of ten cases a token follows from the one two places before it, by a fixed table.

Operators of DEFault++ that change weights are applied to pretrained models there, so they are here: `pretrained` trains
one in a process of its own and keeps it in the temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

WORDS, LENGTH = 24, 16
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Bert(nn.Module):
    """Logits of two classes for sentences with padding."""

    def __init__(self, layers: int = 2):
        super().__init__()
        self.model = BertForSequenceClassification(
            BertConfig(
                vocab_size=WORDS, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4,
                intermediate_size=128, max_position_embeddings=LENGTH, attn_implementation="eager",
            )
        )  # fmt: skip

    def forward(self, tokens):
        return self.model(tokens, attention_mask=(tokens != 0).long()).logits


class Gpt2(nn.Module):
    """Logits of the next token, at each place."""

    def __init__(self):
        super().__init__()
        self.model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=WORDS, n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=0, eos_token_id=0,
                attn_implementation="eager", tie_word_embeddings=False, use_cache=False,
            )
        )  # fmt: skip

    def forward(self, tokens):
        return self.model(tokens).logits


def order(seed: int, batches: int = 60, size: int = 32) -> Batches:
    g, n = torch.Generator().manual_seed(seed), batches * size
    tokens = torch.randint(3, WORDS, (n, LENGTH), generator=g)
    beyond = torch.arange(LENGTH) >= torch.randint(LENGTH // 2, LENGTH + 1, (n, 1), generator=g)
    places = torch.rand(n, LENGTH, generator=g).masked_fill(beyond, -1).topk(2).indices
    tokens.scatter_(1, places, torch.tensor([1, 2]).expand(n, 2))
    tokens[beyond] = 0
    return list(zip(tokens.split(size), (places[:, 0] < places[:, 1]).long().split(size), strict=True))


def chain(seed: int, batches: int = 60, size: int = 32) -> Batches:
    g, n = torch.Generator().manual_seed(seed), batches * size
    table = torch.randperm(WORDS, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(WORDS, (n, LENGTH + 1), generator=g)
    follows = torch.rand(n, LENGTH + 1, generator=g) < 0.9
    for i in range(2, LENGTH + 1):
        tokens[:, i] = torch.where(follows[:, i], table[tokens[:, i - 2]], tokens[:, i])
    return list(zip(tokens[:, :-1].split(size), tokens[:, 1:].split(size), strict=True))


def next_token(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def accuracy(model: nn.Module, data: Batches) -> float:
    """The share of right classes, or of right tokens where there is one at each place."""
    model.eval()
    with torch.no_grad():
        return torch.cat([(model(x).argmax(-1) == y).float().flatten() for x, y in data]).mean().item()


KINDS = {"bert": (Bert, order, F.cross_entropy), "gpt2": (Gpt2, chain, next_token)}


def pretrained(kind: str, seed: int) -> nn.Module:
    """A model of this kind that has learned its task on other sentences."""
    kept = Path(tempfile.gettempdir()) / "torchhook_real" / f"{kind}_{seed}_1.pt"
    if not kept.exists():
        subprocess.run([sys.executable, __file__, kind, str(seed), str(kept)], check=True)
    model = KINDS[kind][0]()
    model.load_state_dict(torch.load(kept))
    return model


def _pretrain(kind: str, seed: int, kept: Path) -> None:
    torch.manual_seed(seed)
    build, task, loss = KINDS[kind]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step, (x, y) in enumerate(task(1000 + seed, batches=700)):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1, (step + 1) / 50, (700 - step) / 300)
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
    kept.parent.mkdir(exist_ok=True)
    unfinished = kept.with_suffix(f".{os.getpid()}")
    torch.save(model.state_dict(), unfinished)
    unfinished.replace(kept)


if __name__ == "__main__":
    _pretrain(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
