"""Small tasks: real data from scikit-learn and scikit-image, and synthetic sequences."""

from __future__ import annotations

from functools import lru_cache

import torch
from skimage import data as pictures
from sklearn import datasets
from torch.nn import functional as F


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batched(x: torch.Tensor, y: torch.Tensor, seed: int, batches: int, size: int) -> list:
    """Batches of samples in a random order, reshuffled when they run out."""
    order = torch.cat(
        [torch.randperm(len(x), generator=generator(seed + i)) for i in range(batches * size // len(x) + 1)]
    )
    return [(x[at], y[at]) for at in order[: batches * size].split(size)]


@lru_cache
def _digits():
    found = datasets.load_digits()
    return torch.tensor(found.images, dtype=torch.float32).unsqueeze(1), torch.tensor(found.target)


def digits(seed: int, batches: int = 16, size: int = 32, *, scale: str = "standard", classes=range(10)) -> list:
    """Handwritten digits of 8 by 8 pixels: standardised, in [0, 1] ("unit") or as bytes ("raw")."""
    x, y = _digits()
    kept = torch.isin(y, torch.tensor(list(classes)))
    x, y = x[kept], y[kept] - min(classes)
    x = {"standard": (x / 16 - 0.305) / 0.376, "unit": x / 16, "raw": x * (255 / 16)}[scale]
    return batched(x, y, seed, batches, size)


@lru_cache
def _textures():
    names = ("brick", "grass", "gravel")
    return torch.stack([torch.tensor(getattr(pictures, name)(), dtype=torch.float32) for name in names])


def textures(seed: int, batches: int = 16, size: int = 24, side: int = 16) -> list:
    """Square pieces of photographs of brick, grass and gravel."""
    y = torch.randint(3, (batches * size,), generator=generator(seed))
    corners = torch.randint(512 - side, (batches * size, 2), generator=generator(seed + 1))
    images = _textures()
    x = torch.stack([images[c, i : i + side, j : j + side] for c, (i, j) in zip(y, corners.tolist(), strict=True)])
    return batched((x.unsqueeze(1) - 118) / 45, y, seed, batches, size)


def coins(seed: int, batches: int = 12, size: int = 8, side: int = 32) -> list:
    """Pieces of a photograph of coins, and which pixels are coin (brighter than their background)."""
    image = torch.tensor(pictures.coins(), dtype=torch.float32)
    mask = (F.avg_pool2d(image[None, None], 5, 1, 2)[0, 0] > 110).float()
    corners = torch.stack(
        [torch.randint(n - side, (batches * size,), generator=generator(seed)) for n in image.shape], 1
    )
    corners[:, 1] = torch.randint(image.shape[1] - side, (batches * size,), generator=generator(seed + 1))
    cut = [[whole[i : i + side, j : j + side] for i, j in corners.tolist()] for whole in ((image - 97) / 53, mask)]
    return batched(*(torch.stack(pieces).unsqueeze(1) for pieces in cut), seed, batches, size)


@lru_cache
def _table(name: str):
    found = getattr(datasets, f"load_{name}")()
    return torch.tensor(found.data, dtype=torch.float32), torch.tensor(found.target)


def standardised(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / x.std(0)


def cancer(seed: int, batches: int = 12, size: int = 32, *, scale: bool = True) -> list:
    """30 measures of cells, from 0.01 to 4000 when not scaled, and which of two kinds they are."""
    x, y = _table("breast_cancer")
    return batched(standardised(x) if scale else x, y, seed, batches, size)


def diabetes(seed: int, batches: int = 12, size: int = 32) -> list:
    """10 measures of patients, and the course of their disease: a regression, targets (N, 1)."""
    x, y = _table("diabetes")
    return batched(standardised(x), standardised(y.float()).unsqueeze(1), seed, batches, size)


def rings(seed: int, batches: int = 16, size: int = 32, classes: int = 3, width: int = 8, share=None) -> list:
    """Points on noisy shells, one radius for each class; `share` is the frequency of each class."""
    count = batches * size
    share = torch.ones(classes) if share is None else torch.tensor(share)
    y = torch.multinomial(share, count, replacement=True, generator=generator(seed))
    x = F.normalize(torch.randn(count, width, generator=generator(seed + 1)), dim=1)
    x = x * (0.5 + 1.5 * y[:, None]) + 0.1 * torch.randn(count, width, generator=generator(seed + 2))
    return batched(x * width**0.5 / 2, y, seed, batches, size)


def blobs(seed: int, batches: int = 16, size: int = 32, classes: int = 4, width: int = 16, share=None) -> list:
    """Clouds of points, one for each class, that overlap a little."""
    count = batches * size
    share = torch.ones(classes) if share is None else torch.tensor(share)
    y = torch.multinomial(share, count, replacement=True, generator=generator(seed))
    centres = torch.randn(classes, width, generator=generator(seed + 1))
    x = (centres[y] + 0.7 * torch.randn(count, width, generator=generator(seed + 2))) / 1.2
    return batched(x, y, seed, batches, size)


@lru_cache
def _text():
    names = ("breast_cancer", "wine", "iris", "digits", "diabetes")
    text = " ".join(getattr(datasets, f"load_{name}")().DESCR.lower() for name in names)
    text = "".join(c if c.isalpha() and c.isascii() else " " for c in text)
    return torch.tensor([0 if c == " " else ord(c) - 96 for c in " ".join(text.split())])


LETTERS = 27


def text(seed: int, batches: int = 20, size: int = 24, length: int = 24) -> torch.Tensor:
    """Pieces of English as letters (0 is a space): (batches, size, length)."""
    letters = _text()
    starts = torch.randint(len(letters) - length, (batches * size,), generator=generator(seed))
    return torch.stack([letters[at : at + length] for at in starts.tolist()]).view(batches, size, length)


def bags(seed: int, batches: int = 16, size: int = 32, length: int = 12, words: int = 20, classes: int = 4) -> list:
    """Sentences of various lengths, padded with 0, most of whose words belong to the class."""
    g, count = generator(seed), batches * size
    y = torch.randint(classes, (count,), generator=g)
    own = 1 + y[:, None] + classes * torch.randint(words // classes, (count, length), generator=g)
    other = torch.randint(1, words + 1, (count, length), generator=g)
    x = torch.where(torch.rand(count, length, generator=g) < 0.5, own, other)
    lengths = torch.randint(4, length + 1, (count, 1), generator=g)
    return batched(x * (torch.arange(length) < lengths), y, seed, batches, size)


def waves(seed: int, batches: int = 16, size: int = 32, length: int = 24, classes: int = 4, width: int = 1) -> list:
    """Noisy sine waves (N, length, width) of one frequency for each class, at any phase."""
    g, count = generator(seed), batches * size
    y = torch.randint(classes, (count,), generator=g)
    phase = 6.28 * torch.rand(count, 1, width, generator=g)
    time = torch.arange(length).view(1, length, 1)
    x = torch.sin(phase + (0.3 + 0.5 * y.view(-1, 1, 1)) * time) + 0.1 * torch.randn(count, length, width, generator=g)
    return batched(x * 1.4, y, seed, batches, size)
