"""Faults of attention: each position attends to a single other one."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from zoo.case import Case, Sites, fault, inside, pick
from zoo.healthy_sequences import gpt
from zoo.healthy_vision import vit_encoder_layers, vit_warmup
from zoo.nets import Attention, Block, ViT
from zoo.tasks import digits


def _sharpened(weight: torch.Tensor, bias: torch.Tensor, by: float) -> None:
    """Scale queries and keys, which a joint projection holds before the values."""
    with torch.no_grad():
        weight[: 2 * len(weight) // 3] *= by
        bias[: 2 * len(bias) // 3] *= by


def _block_sites(seed: int) -> Sites:
    return inside(sharp_attention.build(seed).model, f"blocks.{seed % 2}.attn")


@fault("TH802", "TH803", sites=_block_sites)
def sharp_attention(seed: int) -> Case:
    """Queries and keys of one block are several times too large: almost all weight falls on one position."""
    case = vit_warmup.build(seed)
    case.loop = None
    attention = case.model.blocks[seed % 2].attn
    _sharpened(attention.qkv.weight, attention.qkv.bias, pick(seed, 8, 12))
    return case


@fault("TH803", "TH802", sites=lambda seed: inside(huge_logits.build(seed).model, f"blocks.{seed % 2}.attn"))
def huge_logits(seed: int) -> Case:
    """In a language model, where the scores reach thousands."""
    case = gpt.build(seed)
    attention = case.model.blocks[seed % 2].attn
    _sharpened(attention.qkv.weight, attention.qkv.bias, pick(seed, 60, 100))
    return case


@fault("TH803", "TH802", sites=lambda seed: inside(huge_logits_encoder.build(seed).model, "blocks.0.self_attn"))
def huge_logits_encoder(seed: int) -> Case:
    """The same in PyTorch's own attention."""
    case = vit_encoder_layers.build(seed)
    attention = case.model.blocks[0].self_attn
    _sharpened(attention.in_proj_weight, attention.in_proj_bias, pick(seed, 20, 30))
    return case


@fault("TH802", "TH803", sites=lambda seed: inside(scaled_upwards.build(seed).model, "blocks.0.attn", "blocks.1.attn"))
def scaled_upwards(seed: int) -> Case:
    """Scores are multiplied by the root of the width instead of divided by it, and queries are not small."""
    torch.manual_seed(seed)
    width = pick(seed, 24, 32)
    attention = partial(Attention, scale=width**0.5)
    model = ViT(width=width, depth=2, heads=1, block=partial(Block, attention=attention))
    for block in model.blocks:
        _sharpened(block.attn.qkv.weight, block.attn.qkv.bias, 2)
    return Case(model, digits(seed), F.cross_entropy, torch.optim.AdamW(model.parameters(), 3e-3))


SPECIMENS = (sharp_attention, huge_logits, huge_logits_encoder, scaled_upwards)
