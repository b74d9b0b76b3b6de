"""How far apart two sets of samples are: distances between distributions, a permutation test, and a classifier.

Each function takes the features of both sets, samples × features in float64. A V-statistic also pairs every sample with
itself and is too large for few samples. A U-statistic does not, and is as often below zero as above if nothing differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchhook.compare.auc import auc_of

FOLDS = 5
_PENALTY = 1.0  # on the squared weights of standardized features
_AT_ONCE = 256  # permutations in one matrix product


class Statistics(NamedTuple):
    """A distance as the mean over pairs of samples: as a U-statistic (unbiased) and as a V-statistic."""

    u: float
    v: float


def squared_distances(x: Tensor) -> Tensor:
    """The squared distances of all samples from one another.

    >>> squared_distances(torch.tensor([[1.0], [4.0]]).double())
    tensor([[0., 9.],
            [9., 0.]], dtype=torch.float64)
    """
    x = x - x.mean(0)
    norms = x.square().sum(1)
    squared = (norms[:, None] + norms - 2 * x @ x.T).clamp(min=0)
    return squared.fill_diagonal_(0)


def bandwidth(squared: Tensor) -> Tensor:
    """Twice the variance of a Gaussian kernel: the median squared distance of two samples."""
    first, second = torch.triu_indices(len(squared), len(squared), 1, device=squared.device)
    pairs = squared[first, second]
    median = pairs.median()
    return median if median > 0 else pairs.mean()  # more than half of the pairs are equal


def between(kernel: Tensor, sources: int) -> Statistics:
    """The mean of K within the first `sources` samples, plus that within the others, minus twice that between them."""
    n, m = sources, len(kernel) - sources
    within, others, across = kernel[:n, :n], kernel[n:, n:], kernel[:n, n:].mean()
    v = within.mean() + others.mean() - 2 * across
    u = _off_diagonal(within) / (n * (n - 1)) + _off_diagonal(others) / (m * (m - 1)) - 2 * across
    return Statistics(float(u), float(v))


def p_value(kernel: Tensor, sources: int, permutations: int, generator: torch.Generator) -> float:
    """How often random splits of the samples differ at least as much: (1 + k) / (1 + permutations)."""
    total, n = len(kernel), sources
    m = total - n
    apart = kernel.clone().fill_diagonal_(0)
    rows = apart.sum(1)
    order = torch.arange(total, device=kernel.device)
    observed = _statistics(apart, rows, (order < n).double()[:, None], n, m)
    slack = 1e-9 * kernel.abs().max()  # so that ties count despite rounding
    beyond = 0
    for count in _portions(permutations):
        labels = torch.rand(total, count, generator=generator, dtype=torch.float64).argsort(0).to(kernel.device) < n
        beyond += int((_statistics(apart, rows, labels.double(), n, m) >= observed - slack).sum())
    return (1 + beyond) / (1 + permutations)


def coral(x: Tensor, y: Tensor) -> float:
    """|S - T|² / 4d², of the covariances S and T of d features (Sun and Saenko 2016)."""
    x, y = _scaled(x), _scaled(y)
    if x.shape[1] > max(len(x), len(y)):  # the Gram matrix is smaller than the covariance
        squared = (x @ x.T).square().sum() + (y @ y.T).square().sum() - 2 * (x @ y.T).square().sum()
    else:
        squared = (x.T @ x - y.T @ y).square().sum()
    return float(squared.clamp(min=0) / (4 * x.shape[1] ** 2))


def frechet(x: Tensor, y: Tensor) -> float:
    """|m - o|² + tr(S + T - 2 (ST)^½) of means m, o and covariances S, T: the distance of normal distributions."""
    shift = (x.mean(0) - y.mean(0)).square().sum()
    x, y = _scaled(x), _scaled(y)
    if x.shape[1] > max(len(x), len(y)):
        root = torch.linalg.svdvals(x @ y.T).sum()
    else:
        values, vectors = torch.linalg.eigh(x.T @ x)
        half = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
        root = torch.linalg.eigvalsh(half @ (y.T @ y) @ half).clamp(min=0).sqrt().sum()
    return float((shift + x.square().sum() + y.square().sum() - 2 * root).clamp(min=0))


def classifier_auc(x: Tensor, y: Tensor, generator: torch.Generator) -> float:
    """How well a logistic regression separates `y` from `x` on held-out samples; 0.5 means not at all.

    The area under the ROC curve, averaged over five folds.
    """
    folds = [torch.randperm(len(side), generator=generator).to(side.device) % FOLDS for side in (x, y)]
    found = []
    for fold in range(FOLDS):
        (seen_x, new_x), (seen_y, new_y) = (
            (side[of != fold], side[of == fold]) for side, of in zip((x, y), folds, strict=True)
        )
        scores = _LogisticRegression(seen_x, seen_y)
        found.append(auc_of(scores(new_y), scores(new_x)).value)
    return sum(found) / len(found)


class _LogisticRegression:
    """Logistic regression that separates `y` from `x`, with the default penalty of scikit-learn."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        both = torch.cat([x, y])
        self.mean, self.scale = both.mean(0), both.std(0, correction=0)
        self.scale[self.scale == 0] = 1
        labels = (torch.arange(len(both), device=x.device) >= len(x)).double()
        features = self._standard(both)
        self.weights = torch.zeros(both.shape[1] + 1, dtype=torch.float64, device=x.device, requires_grad=True)
        solver = torch.optim.LBFGS([self.weights], max_iter=200, tolerance_grad=1e-6, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            solver.zero_grad()
            logits = features @ self.weights[:-1] + self.weights[-1]
            wrong = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
            total = wrong + 0.5 * _PENALTY * self.weights[:-1].square().sum()
            total.backward()
            return total

        with torch.enable_grad():
            solver.step(loss)
        self.weights.requires_grad_(False)

    def __call__(self, x: Tensor) -> Tensor:
        return self._standard(x) @ self.weights[:-1] + self.weights[-1]

    def _standard(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.scale


def _statistics(apart: Tensor, rows: Tensor, labels: Tensor, n: int, m: int) -> Tensor:
    """The U-statistic for each column of `labels`, which is 1 for sources; the diagonal of `apart` is zero."""
    within = (labels * (apart @ labels)).sum(0)
    touched = rows @ labels
    across = touched - within
    others = rows.sum() - 2 * touched + within
    return within / (n * (n - 1)) + others / (m * (m - 1)) - 2 * across / (n * m)


def _portions(count: int) -> Iterator[int]:
    for begin in range(0, count, _AT_ONCE):
        yield min(_AT_ONCE, count - begin)


def _off_diagonal(kernel: Tensor) -> Tensor:
    """The sum over all pairs of different samples."""
    return kernel.sum() - kernel.trace()


def _scaled(x: Tensor) -> Tensor:
    """Centred samples X such that X'X is the covariance."""
    centred = x - x.mean(0)
    return centred / math.sqrt(len(x) - 1)
