"""Data that several programs share."""

from __future__ import annotations

from functools import lru_cache

import torch
from sklearn import datasets
from torch.nn import functional as F


@lru_cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = datasets.load_digits()
    small = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    images = F.interpolate(small, size=(20, 20), mode="bicubic", align_corners=False)
    images = F.pad((1.6 * images - 0.3).clamp(0, 1), (4, 4, 4, 4))  # as sharp and as dark as MNIST
    return images, torch.tensor(found.target)


Pair = tuple[torch.Tensor, torch.Tensor]


def mnist(seed: int = 0, train: int = 1500) -> tuple[Pair, Pair]:
    """(x, y) to train on and (x, y) to test on: digits like those of MNIST, of 1 by 28 by 28 pixels in [0, 1].

    They are scikit-learn's 1797 digits, enlarged into a frame of zeros: mean .16 and deviation .33, where MNIST has .13
    and .31.
    """
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    first, last = order[:train], order[train:]
    return (x[first], y[first]), (x[last], y[last])
