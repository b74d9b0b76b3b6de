"""A contrastive training under DDP; every other forward goes to the bare module, whose gradients nobody averages.

Calling the wrapper every time repairs it. Largest difference of a weight between the ranks: .037 → 0.
Source: TC x-jxmnop-ddp-out-of-sync; a small BERT from a config.
"""

from __future__ import annotations

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

from real.ranks import apart, two

CAUSES = ("rank-difference",)
SITES = ()
LOOP = True


def contrastive(output: torch.Tensor) -> torch.Tensor:
    """Each of the first half belongs to one of the second half."""
    first, second = F.normalize(output.mean(1), dim=1).chunk(2)
    return F.cross_entropy(10 * first @ second.T, torch.arange(len(first)))


def train(repaired: bool = False, seed: int = 0) -> float:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    torch.manual_seed(100 * seed + distributed.get_rank())  # each rank has its own sentences
    for step in range(60):
        tokens = torch.randint(50, (8, 16))
        changed = torch.where(torch.rand(8, 16) < 0.3, torch.randint(50, (8, 16)), tokens)
        used = wrapped if repaired or step % 2 else model
        optimizer.zero_grad()
        loss = contrastive(used(torch.cat([tokens, changed])).last_hidden_state)
        loss.backward()
        optimizer.step()
    return apart(list(model.parameters()))


if __name__ == "__main__":
    two(train)
