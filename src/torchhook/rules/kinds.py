"""What a module does, judged by the name of its class: statistics, which rules read, know nothing else about it."""

from __future__ import annotations

import re
from functools import cache

_KINDS = {
    "batchnorm": r"BatchNorm",
    "norm": r"Norm",
    "leaky": r"(Leaky|P|R)ReLU|(?<!R)ELU|SiLU|Swish|Mish|Softplus|GELU|^(?!.*ReLU).*Activation",
    "rectifier": r"ReLU",
    "sigmoid": r"^Sigmoid$",
    "tanh": r"^Tanh$",
    "dropout": r"Drop|StochasticDepth",
    "embedding": r"Embedding",
    "recurrent": r"LSTM|GRU|RNN",
    "attention": r"Attention",
    "weight": r"Conv\w*[123]D|Linear",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _KINDS.items()}

NORMS = frozenset({"batchnorm", "norm"})
ACTIVATIONS = frozenset({"leaky", "rectifier", "sigmoid", "tanh"})


@cache
def kind_of(label: str) -> str:
    """The kind of a module, by the name of its class; ``"other"`` if the name says nothing.

    >>> kind_of("Conv2d"), kind_of("ReLU6"), kind_of("LeakyReLU"), kind_of("MyBatchNorm2d"), kind_of("Flatten")
    ('weight', 'rectifier', 'leaky', 'batchnorm', 'other')
    >>> kind_of("ReLUSquaredActivation"), kind_of("QuickGELUActivation")
    ('rectifier', 'leaky')
    """
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.search(label)), "other")
