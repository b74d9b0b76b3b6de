"""How similar two sets of features are, computed from their moments alone.

The moments of two layers are one matrix, the sum over samples of (x, |x|², 1) times (y, |y|², 1). It has all that a
measure needs, is exact for any batch sizes, and may be relative to any origin. In the formulas K and L are the Gram
matrices of x and y: the inner products of all samples with one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_KEPT = 0.99  # of the variance, by SVCCA
_ROUNDED = 4  # machine epsilons by which the sums in a layer may be off


class Measure(NamedTuple):
    """A similarity in two steps: `own` prepares each layer by itself, and `joint` combines two of them.

    The second argument of `own` is how much of the variance in a direction may be rounding.
    """

    own: Callable[[Tensor, float], Any]
    joint: Callable[[Any, Any, Tensor], Tensor]


def widened(x: Tensor) -> Tensor:
    """(x, |x|², 1) for every row of `x`.

    >>> widened(torch.tensor([[3.0, 4.0]]))
    tensor([[ 3.,  4., 25.,  1.]])
    """
    return torch.cat([x, x.square().sum(1, keepdim=True), x.new_ones(len(x), 1)], 1)


def moments(x: Tensor, y: Tensor) -> Tensor:
    """The moments of two sets of features of the same samples, relative to the means of `x` and `y`."""
    x, y = x.double(), y.double()
    return widened(x - x.mean(0)).T @ widened(y - y.mean(0))


def rounding(moments: Tensor, origin: Tensor, eps: float) -> float:
    """How much of the variance in a direction may be rounding alone, for moments relative to `origin`.

    Each feature is off independently by its size times `eps`, so no direction is off by more than the largest.
    """
    squares = moments.diagonal()[:-2] + 2 * origin * moments[:-2, -1] + count_of(moments) * origin.square()
    return (_ROUNDED * eps) ** 2 * float(squares.max())


def count_of(moments: Tensor) -> Tensor:
    """The number of samples."""
    return moments[-1, -1]


def centred(moments: Tensor) -> Tensor:
    """X'Y of the centred features: the covariance times the number of samples."""
    return moments[:-2, :-2] - torch.outer(moments[:-2, -1], moments[-1, :-2]) / count_of(moments)


def unbiased(moments: Tensor) -> Tensor:
    """The unbiased estimate of HSIC times n (n - 3), where n ≥ 4 is the number of samples (Song et al. 2012).

    That is tr(KL) + 1'K1 1'L1 / (n - 1)(n - 2) - 2 1'KL1 / (n - 2) with zeros in the diagonals of K and L.
    """
    n, xy = count_of(moments), moments[:-2, :-2]
    sum_x, sum_y = moments[:-2, -1], moments[-1, :-2]
    norms_x, norms_y, norms = moments[-2, -1], moments[-1, -2], moments[-2, -2]
    trace = xy.square().sum() - norms
    ones_x, ones_y = sum_x @ sum_x - norms_x, sum_y @ sum_y - norms_y
    rows = sum_x @ xy @ sum_y - sum_x @ moments[:-2, -2] - moments[-2, :-2] @ sum_y + norms
    return trace + ones_x * ones_y / ((n - 1) * (n - 2)) - 2 * rows / (n - 2)


def u_centred(gram: Tensor) -> Tensor:
    """A centred Gram matrix of n samples: the sum of the product of two of them is `unbiased`.

    Rows and columns sum to zero, and the diagonal is zero (Székely and Rizzo 2014).
    """
    n = gram.shape[-1]
    gram = gram.to(torch.float64, copy=True)
    gram.diagonal(dim1=-2, dim2=-1).zero_()
    means = gram.sum(-1) / (n - 2)
    gram -= means[..., None, :]
    gram -= (means - means.sum(-1, keepdim=True) / (n - 1))[..., None]
    gram.diagonal(dim1=-2, dim2=-1).zero_()
    return gram


class Whitening(NamedTuple):
    """The map that makes features uncorrelated with variance 1, and its inverse."""

    to_white: Tensor  # features × directions
    from_white: Tensor  # directions × features


def _whitening(moments: Tensor, rounding: float, kept: float = 1.0) -> Whitening:
    """The whitening of the largest directions that hold a share of the variance, leaving out those of rounding."""
    values, vectors = torch.linalg.eigh(centred(moments))
    values, vectors = values.flip(0), vectors.flip(1)
    real = values > (values[0] * len(values) * torch.finfo(values.dtype).eps * 10).clamp(min=rounding)
    real[0] = True  # whether the layer varies at all is checked before
    if kept < 1:
        before = values.cumsum(0) - values  # variance of all larger ones
        real &= before < kept * values.sum()
    values, vectors = values[real], vectors[:, real]
    return Whitening(vectors / values.sqrt(), (vectors * values.sqrt()).T)


def _correlations(x: Whitening, y: Whitening, moments: Tensor) -> Tensor:
    return x.to_white.T @ centred(moments) @ y.to_white


def _mean_correlation(x: Whitening, y: Whitening, moments: Tensor) -> Tensor:
    values: Tensor = torch.linalg.svdvals(_correlations(x, y, moments))
    return values.clamp(max=1).mean()


def _projection_weighted(x: Whitening, y: Whitening, moments: Tensor) -> Tensor:
    """Correlations weighted by what their direction accounts for in the layer with fewer of them (Morcos 2018)."""
    left, values, right = torch.linalg.svd(_correlations(x, y, moments), full_matrices=False)
    of_x = len(x.from_white) <= len(y.from_white)
    weights: Tensor = ((left.T @ x.from_white) if of_x else (right @ y.from_white)).abs().sum(1)
    weighted: Tensor = weights * values.clamp(max=1)
    return weighted.sum() / weights.sum()


DEBIASED_CKA = Measure(lambda xx, _: unbiased(xx).clamp(min=0).sqrt(), lambda x, y, xy: unbiased(xy) / (x * y))

MEASURES = {
    "cka": Measure(lambda xx, _: centred(xx).norm(), lambda x, y, xy: centred(xy).square().sum() / (x * y)),
    "cca": Measure(_whitening, _mean_correlation),
    "svcca": Measure(lambda xx, rounding: _whitening(xx, rounding, _KEPT), _mean_correlation),
    "pwcca": Measure(_whitening, _projection_weighted),
    "procrustes": Measure(
        lambda xx, _: centred(xx).trace().sqrt(), lambda x, y, xy: torch.linalg.svdvals(centred(xy)).sum() / (x * y)
    ),
}
"""The measures, all computed from moments; each is 1 for features that differ by a rotation and a scale."""


def likeness(x: Tensor, y: Tensor, measure: Measure) -> float:
    """The similarity of two sets of features, each given as a whole.

    >>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, 3.0], [5.0, 1.0], [4.0, 4.0]])
    >>> round(likeness(x, x * 3 + 1, DEBIASED_CKA), 6)
    1.0
    """

    def own(z: Tensor) -> Any:
        zz = moments(z, z)
        return measure.own(zz, rounding(zz, z.double().mean(0), torch.finfo(z.dtype).eps))

    return float(measure.joint(own(x), own(y), moments(x, y)))
