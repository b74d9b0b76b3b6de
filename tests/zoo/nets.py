"""Small networks with named parts, which healthy and faulty specimens share."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """``layers.linear0``, ``layers.act0``, ... and a linear ``head``."""

    def __init__(self, sizes, act=nn.ReLU, classes: int = 10, dropout: float = 0.0):
        super().__init__()
        layers = OrderedDict()
        for i, (narrow, wide) in enumerate(pairwise(sizes)):
            layers[f"linear{i}"] = nn.Linear(narrow, wide)
            layers[f"act{i}"] = act()
        self.layers = nn.Sequential(layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        return self.head(self.dropout(self.layers(x.flatten(1))))


class FunctionalMlp(nn.Module):
    """``linears.0``, ``linears.1``, ... with a function of torch between them, and a ``head``."""

    def __init__(self, sizes, act=F.relu, classes: int = 10):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.act = act
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        x = x.flatten(1)
        for linear in self.linears:
            x = self.act(linear(x))
        return self.head(x)


class ConvNet(nn.Module):
    """``features.conv0``, ``features.norm0``, ``features.act0``, ..., dropout and a linear ``head``."""

    def __init__(self, width=12, depth=3, norm=None, act=nn.ReLU, classes=10, side=8, dropout=0.0):
        super().__init__()
        layers = OrderedDict()
        for i in range(depth):
            layers[f"conv{i}"] = nn.Conv2d(width if i else 1, width, 3, padding=1, bias=norm is None)
            if norm is not None:
                layers[f"norm{i}"] = norm(width)
            layers[f"act{i}"] = act()
            if i == 0:
                layers["pool"] = nn.MaxPool2d(side // 4)
        self.features = nn.Sequential(layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16 * width, classes)

    def forward(self, x):
        return self.head(self.dropout(self.features(x).flatten(1)))


class Residual(nn.Module):
    """Two convolutions beside a shortcut; its one ReLU is a module that works in place."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + x)


class FunctionalResidual(Residual):
    """The same with ``F.relu``."""

    def __init__(self, width: int):
        super().__init__(width)
        del self.relu

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + x)


class ResNet(nn.Module):
    """``conv1``, ``bn1``, ``blocks.0`` ..., an average over all pixels, ``fc``."""

    def __init__(self, width=12, depth=3, block=Residual, classes=10, zero=False):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(2)
        self.blocks = nn.Sequential(*(block(width) for _ in range(depth)))
        self.fc = nn.Linear(width, classes)
        for one in self.blocks:
            nn.init.constant_(one.bn2.weight, 0.0 if zero else 1.0)

    def forward(self, x):
        x = self.blocks(self.pool(F.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


class Attention(nn.Module):
    """Self-attention by ``F.scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int = 2, causal: bool = False, scale: float | None = None):
        super().__init__()
        self.heads, self.causal, self.scale = heads, causal, scale
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.proj(mixed.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """A pre-norm transformer block: ``ln1``, ``attn``, ``ln2``, ``fc1``, ``act``, ``fc2``."""

    def __init__(self, width: int, heads: int = 2, causal: bool = False, attention=Attention):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = attention(width, heads, causal)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))


class EncoderBlock(nn.TransformerEncoderLayer):
    """PyTorch's own layer, with the defaults: post-norm and ReLU."""

    def __init__(self, width: int, heads: int = 2):
        super().__init__(width, heads, 2 * width, dropout=0.0, batch_first=True)


class ViT(nn.Module):
    """16 patches of 2 by 2 pixels and their average: ``patches``, ``blocks.0`` ..., ``norm``, ``head``."""

    def __init__(self, width=32, depth=2, heads=2, block=Block, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(torch.randn(1, 16, width) * 0.5)
        self.blocks = nn.Sequential(*(block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


class Gpt(nn.Module):
    """A causal language model whose head is its embedding; it returns its own loss, as models of transformers do."""

    def __init__(self, words=27, width=32, depth=2, heads=2, length=24, attention=Attention):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True, attention) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)
        self.head.weight = self.tokens.weight

    def forward(self, ids, labels=None):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(x)))
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


class Recurrent(nn.Module):
    """``rnn`` over the rows of a picture or the steps of a series, and a ``head`` that reads its last state."""

    def __init__(self, width_in: int, width: int = 24, classes: int = 10, kind=nn.LSTM, **options):
        super().__init__()
        self.rnn = kind(width_in, width, batch_first=True, **options)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        out, _ = self.rnn(x.squeeze(1) if x.dim() == 4 else x)
        return self.head(out[:, -1])


class UNet(nn.Module):
    """Two steps down and up again, with a skip at each: ``down.0``, ``middle``, ``up.0`` ..., ``out``."""

    def __init__(self, width: int = 8, norm=nn.BatchNorm2d):
        super().__init__()

        def stage(a, b):
            return nn.Sequential(OrderedDict(conv=nn.Conv2d(a, b, 3, padding=1), norm=norm(b), act=nn.ReLU()))

        self.down = nn.ModuleList([stage(1, width), stage(width, 2 * width)])
        self.middle = stage(2 * width, 2 * width)
        self.grow = nn.ModuleList([nn.ConvTranspose2d(2 * width, width, 2, 2), nn.ConvTranspose2d(width, width, 2, 2)])
        self.up = nn.ModuleList([stage(3 * width, width), stage(2 * width, width)])
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        kept = []
        for stage in self.down:
            kept.append(stage(x))
            x = F.max_pool2d(kept[-1], 2)
        x = self.middle(x)
        for grow, stage in zip(self.grow, self.up, strict=True):
            x = stage(torch.cat([grow(x), kept.pop()], 1))
        return self.out(x)
