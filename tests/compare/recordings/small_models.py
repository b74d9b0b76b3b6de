"""Small language models with other names and other ways to compute, and faults to plant in them."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 211, 32, 64, 4, 3


@dataclass
class Fault:
    """What is wrong in a model, and in which layers; nothing by default."""

    base: float = 10000.0
    scale: float = 1.0
    shift: int = 0  # of the causal mask
    drop: float = 0.0
    layers: tuple[int, ...] = tuple(range(LAYERS))


class Norm(nn.Module):
    """The norm of Llama."""

    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values, or with three; rotary positions if asked for."""

    def __init__(self, width, heads, layer, fault, fused, bias, rotary, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size, self.rotary = heads, kv_heads, width // heads, rotary
        self.fault = fault if layer in fault.layers else Fault()
        inner = kv_heads * self.size
        if fused:
            self.qkv = nn.Linear(width, width + 2 * inner, bias)
        else:
            self.wq, self.wk, self.wv = (nn.Linear(width, size, bias) for size in (width, inner, inner))
        self.fused, self.out = fused, nn.Linear(width, width, bias)
        self.by_head = False  # whether the fused projection has queries, keys and values of one head, then of the next

    def forward(self, x):
        width, inner = self.heads * self.size, self.kv_heads * self.size
        if self.by_head:
            q, k, v = (one.flatten(-2) for one in self.qkv(x).unflatten(-1, (self.heads, 3, -1)).unbind(-2))
        elif self.fused:
            q, k, v = self.qkv(x).split([width, inner, inner], -1)
        else:
            q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (q, k, v))
        if self.rotary:
            q, k = (turned(one, self.fault.base) for one in (q, k))
        if k.shape[1] != q.shape[1]:
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = q @ k.transpose(-1, -2) * (self.fault.scale / math.sqrt(self.size))
        length = x.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril(self.fault.shift)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1, dtype=torch.float32).to(x.dtype)
        weights = F.dropout(weights, self.fault.drop) if self.fault.drop else weights
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def turned(x, base):
    """Rotary positions, in the order of Llama in transformers."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, device=x.device).float() / half)
    angles = torch.arange(x.shape[-2], device=x.device).float()[:, None] * frequencies
    cos, sin = (part.repeat(1, 2).to(x.dtype) for part in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Gelu(nn.Module):
    """The feed-forward part of GPT-2."""

    def __init__(self, width, fused, bias):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Gated(nn.Module):
    """The feed-forward part of Llama."""

    def __init__(self, width, fused, bias):
        super().__init__()
        inner = 2 * width
        if fused:
            self.gate_up = nn.Linear(width, 2 * inner, bias)
        else:
            self.gate, self.up = nn.Linear(width, inner, bias), nn.Linear(width, inner, bias)
        self.fused, self.down = fused, nn.Linear(inner, width, bias)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, layer, fault, llama, fused, kv_heads, eps):
        super().__init__()
        norm = Norm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(WIDTH, eps), norm(WIDTH, eps)
        self.attn = Attention(WIDTH, HEADS, layer, fault, fused, not llama, llama, kv_heads)
        self.mlp = (Gated if llama else Gelu)(WIDTH, fused, not llama)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A GPT-2 or a Llama in a hundred lines."""

    def __init__(self, fault=None, llama=False, fused=True, kv_heads=HEADS, eps=1e-5, layers=LAYERS):
        super().__init__()
        fault = fault or Fault()
        self.tok = nn.Embedding(VOCABULARY, WIDTH)
        self.pos = None if llama else nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(number, fault, llama, fused, kv_heads, eps) for number in range(layers))
        self.norm = (Norm if llama else nn.LayerNorm)(WIDTH, eps)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids):
        x = self.tok(ids)
        if self.pos is not None:
            x = x + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class EngineNorm(nn.Module):
    """The norm of inference engines: it adds the residual first, and returns both."""

    def __init__(self, source):
        super().__init__()
        self.weight, self.eps = nn.Parameter(source.weight.detach().clone()), source.eps

    def forward(self, x, residual=None):
        residual = x if residual is None else x + residual
        wide = residual.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight, residual


class Shard(nn.Module):
    """The part of a linear layer that one rank has, as a plain tensor; `reduces` adds up what all ranks return."""

    def __init__(self, weight, reduces=False):
        super().__init__()
        self.weight, self.reduces = nn.Parameter(weight.detach().clone()), reduces

    def forward(self, x):
        y = F.linear(x, self.weight)
        if self.reduces and torch.distributed.is_initialized():
            torch.distributed.all_reduce(y)
        return y


class EngineAttention(nn.Module):
    def __init__(self, source, rank, ranks):
        super().__init__()
        self.size, self.fault = source.size, source.fault
        self.widths = [source.heads * self.size // ranks, *[source.kv_heads * self.size // ranks] * 2]
        whole = [width * ranks for width in self.widths]
        parts = [part.chunk(ranks)[rank] for part in source.qkv.weight.split(whole)]
        self.qkv_proj = Shard(torch.cat(parts))
        self.o_proj = Shard(source.out.weight.chunk(ranks, 1)[rank], reduces=True)

    def forward(self, x):
        q, k, v = (one.view(-1, LENGTH, one.shape[-1]) for one in self.qkv_proj(x).split(self.widths, -1))
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (q, k, v))
        q, k = (turned(one, self.fault.base) for one in (q, k))
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = q @ k.transpose(-1, -2) * (self.fault.scale / math.sqrt(self.size))
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(self.fault.shift)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        weights = F.dropout(weights, self.fault.drop) if self.fault.drop else weights
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2).flatten(0, 1))


class EngineMLP(nn.Module):
    def __init__(self, source, rank, ranks):
        super().__init__()
        parts = [part.chunk(ranks)[rank] for part in source.gate_up.weight.chunk(2)]
        self.gate_up_proj = Shard(torch.cat(parts))
        self.down_proj = Shard(source.down.weight.chunk(ranks, 1)[rank], reduces=True)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class EngineLayer(nn.Module):
    def __init__(self, source, rank, ranks):
        super().__init__()
        self.self_attn = EngineAttention(source.attn, rank, ranks)
        self.mlp = EngineMLP(source.mlp, rank, ranks)
        self.input_layernorm = EngineNorm(source.norm1)
        self.post_attention_layernorm = EngineNorm(source.norm2)

    def forward(self, x, residual):
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x), residual)
        return self.mlp(x), residual


class EngineModel(nn.Module):
    """A Llama as inference engines write it, with the names of vLLM and SGLang, sharded by hand."""

    def __init__(self, source, rank=0, ranks=1):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = source.tok
        self.model.layers = nn.ModuleList(EngineLayer(block, rank, ranks) for block in source.blocks)
        self.model.norm = EngineNorm(source.norm)
        self.lm_head = source.head

    def forward(self, ids):
        x, residual = self.model.embed_tokens(ids), None
        for layer in self.model.layers:
            x, residual = layer(x, residual)
        x, _ = self.model.norm(x, residual)
        return self.lm_head(x)


def plant(model, name):
    """Make a fault that is in the weights or settings of a `Language`, not in its code."""
    with torch.no_grad():
        if name == "eps":
            model.blocks[1].norm2.eps = 0.3
        elif name == "swapped":
            swap(model.blocks[1].attn)
        elif name == "head":
            model.head.weight = nn.Parameter(model.head.weight.roll(1, 0))
        elif name == "bias":
            model.blocks[-1].mlp.down.weight.mul_(1.3)


def swap(attn):
    """Keys for queries."""
    if attn.fused:
        size = attn.kv_heads * attn.size
        width = attn.heads * attn.size
        for one in filter(lambda part: part is not None, (attn.qkv.weight, attn.qkv.bias)):
            keys = one[width : width + size].clone()
            one[width : width + size] = one[:size]
            one[:size] = keys
    else:
        attn.wq.weight, attn.wk.weight = attn.wk.weight, attn.wq.weight


FAULTS = {
    "base": {"base": 500.0},
    "mask": {"shift": 1},
    "scale": {"scale": 2.0},
    "dropout": {"drop": 0.3},
    "late mask": {"shift": 1, "layers": (2,)},
    "late scale": {"scale": 2.0, "layers": (1,)},
}
PLANTED = ("eps", "swapped", "head", "bias")
"""Faults in the code of attention, and faults in weights and settings."""
