"""Statistics of attention logits: how focused each head is, and how large the logits are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchhook.core.attention import UNSEEN
from torchhook.stats.stat import Stat, UnlikeError


class Focus(NamedTuple):
    """What `Attention` computes: the mean entropy of each head as a fraction of its maximum, and the largest logit."""

    entropy: Tensor
    largest: float


class Attention(Stat):
    """The entropy of attention by head, and the largest absolute logit, from logits with heads in the second dimension.

    The entropy of a position is divided by the logarithm of the number of keys that it sees: 1 means even attention to
    all of them, 0 attention to one. Positions that see only one key are left out.

    >>> even = Attention().of(torch.zeros(1, 2, 3, 3))
    >>> even.entropy.tolist(), even.largest
    ([1.0, 1.0], 0.0)
    """

    name = "attention"
    additive = False

    def empty(self, x: Tensor) -> Tensor:
        return torch.zeros(3, _heads(x).shape[1], dtype=torch.float64, device=x.device)

    def update(self, state: Tensor, x: Tensor) -> None:
        x = _heads(x)
        if x.shape[1] != state.shape[1]:
            raise UnlikeError(f"there were {state.shape[1]} heads, and now there are {x.shape[1]}")
        seen = x > UNSEEN
        keys = seen.sum(-1)
        entropy = entropy_of(weights_of(x, seen), keys)
        counts = (keys > 1).sum((0, 2), dtype=torch.float64)
        total = entropy.where(keys > 1, 0).sum((0, 2), dtype=torch.float64)
        largest = x.where(seen, 0).abs().amax((0, 2, 3)).double()
        state.copy_(self.merge(torch.stack([state, torch.stack([total, counts, largest])])))

    def merge(self, states: Tensor) -> Tensor:
        total, counts, largest = states.unbind(-2)
        return torch.stack([total.sum(0), counts.sum(0), largest.amax(0)], -2)

    def compute(self, state: Tensor) -> Focus:
        return Focus(state[0] / state[1], float(state[2].max()))


def weights_of(logits: Tensor, seen: Tensor) -> Tensor:
    """The attention weights of each query over the keys that it sees.

    >>> weights_of(torch.zeros(3), torch.tensor([True, True, False]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    return logits.masked_fill(~seen, -torch.inf).softmax(-1)


def entropy_of(weights: Tensor, keys: Tensor) -> Tensor:
    """The entropy of each query over the logarithm of the number of `keys` that it sees; 0 if that is one key.

    >>> entropy_of(torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]), torch.tensor([2, 3]))
    tensor([1.0000, 0.6309])
    """
    entropy: Tensor = torch.special.entr(weights).sum(-1) / keys.clamp(min=2).log()
    return entropy


def _heads(x: Tensor) -> Tensor:
    """Logits as samples × heads × positions × keys."""
    x = x.float() if x.dim() >= 4 else x.float().reshape(-1, 1, *x.shape[-2:])
    return x.flatten(0, -4) if x.dim() > 4 else x
