"""Two models side by side, batch by batch: what their layers gave is added up, and becomes a number a pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.compare.accumulators import LEAST, Alignments, Layer, Moments, exact_width
from torchhook.compare.features import Gathering, Place
from torchhook.compare.measures import DEBIASED_CKA, MEASURES, centred, rounding, unbiased
from torchhook.core.errors import BudgetError
from torchhook.core.text import in_units

_SAME = "the calls of a model must be the same for every batch; select places for which they are, with sites="
_CONSTANT = "it gives the same for every sample, or for all but one, as far as its precision tells"
_ROUNDING = 16  # times the precision of products of samples: less than that is nothing
_CANCELLED = 2**10 * torch.finfo(torch.float64).eps  # what is left of moments must be more, to be right to a thousandth
_CORRELATIONS = ("cca", "pwcca")  # which are all 1 once there are as many features as samples


class Batched(NamedTuple):
    """What a model made of one batch: the features of its narrow layers, and the products of samples of all."""

    features: list[Tensor]
    grams: list[list[Tensor]]


class Numbers(NamedTuple):
    """What came out: see `Likeness`."""

    matrix: Tensor
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    n: int
    exact: Tensor
    left_out: dict[str, str]


class Side:
    """One of the models with its layers in execution order, and what the batch under way has of them."""

    def __init__(self, gathering: Gathering, name: str) -> None:
        self.gathering = gathering
        self.name = name
        self.count = 0  # samples in the latest batch
        self.layers: dict[Place, Layer] = {}
        self.left_out: dict[Place, str] = {}

    @property
    def widths(self) -> list[int]:
        """How many features a sample has, by layer."""
        return [layer.width for layer in self.layers.values()]

    def narrow(self, width: int) -> list[int]:
        """Which layers are not wider than that."""
        return [number for number, own in enumerate(self.widths) if own <= width]

    def labels(self) -> dict[Place, str]:
        """What the layers are called: by path, and by call where there are several."""
        calls: dict[str, int] = {}
        for path, _ in (*self.layers, *self.left_out):
            calls[path] = calls.get(path, 0) + 1
        return {
            place: (place.path or "''") + (f" (call {place.call})" if calls[place.path] > 1 else "")
            for place in (*self.layers, *self.left_out)
        }

    def run(self, batch: Any, width: int, grams: bool) -> Batched:
        """Run a batch, and take of each layer up to `width` its features, and of all, if wanted, the products.

        The first batch says which layers there are.
        """
        batched, met = Batched([], []), list[Place]()
        is_first = not self.layers

        def take(place: Place, rows: Tensor | str) -> None:
            if is_first:
                self._meet(place, rows)
            layer = self.layers.get(place)
            if layer is None or isinstance(rows, str):
                if layer is not None or place not in self.left_out:
                    raise ValueError(f"{place} of model {self.name} is not what it was in the first batch: {_SAME}")
                return
            met.append(place)
            layer.require_width(rows)
            if layer.width <= width:
                batched.features.append(rows.clone())  # the model may overwrite them
            if grams:
                batched.grams.append(layer.grams(rows))

        self.count = self.gathering.run(batch, take)
        if met != list(self.layers):
            missing = next((place for place in self.layers if place not in met), None)
            what = "layers are called in another order" if missing is None else f"{missing} was not called"
            raise ValueError(f"{what} in a later batch of model {self.name} than in the first: {_SAME}")
        if not self.layers:
            reasons = "; ".join(f"{place}: {why}" for place, why in self.left_out.items())
            raise ValueError(f"no layer of model {self.name} can be compared: {reasons}")
        return batched

    def _meet(self, place: Place, rows: Tensor | str) -> None:
        if isinstance(rows, str):
            self.left_out[place] = rows
        else:
            self.layers[place] = Layer(place, rows)


class Tally:
    """What is known of every pair of layers, so far."""

    def __init__(self, sides: Sequence[Side], by: str, debiased: bool, max_bytes: int) -> None:
        self.left, self.right = sides[0], sides[-1]
        self.by = by
        self.estimable = by == "cka" and debiased
        self.measure = DEBIASED_CKA if self.estimable else MEASURES[by]
        self.max_bytes = max_bytes
        self.n = 0
        # until all layers are known, those that may be narrow and those that may be wide
        self.width = math.isqrt(max_bytes // 8)
        self.grams = self.estimable
        self.moments: Moments | None = None
        self.alignments: Alignments | None = None

    def add(self, batch: Any) -> None:
        """Run both models on one batch, and add what they made of it."""
        x = self.left.run(batch, self.width, self.grams)
        y = x if self.right is self.left else self.right.run(batch, self.width, self.grams)
        if not self.n:
            self._begin()
        self.n += self.left.count
        if self.moments is not None:
            features = self._narrow(x)
            self.moments.add(features, features if y is x else self._narrow(y))
        if self.alignments is not None:
            self.alignments.add(x.grams, y.grams)

    def _begin(self) -> None:
        """Decide of which layers moments are kept, once it is known how wide they are."""
        left, right = self.left.widths, self.right.widths
        self.width = exact_width(left, right, self.max_bytes)
        self._require_exact()
        device = next(iter(self.left.layers.values())).device
        x, y = (
            [layer for layer in side.layers.values() if layer.width <= self.width] for side in (self.left, self.right)
        )
        self.moments = Moments(x, y, device) if x and y else None
        self.grams = max(*left, *right) > self.width
        self.alignments = Alignments(len(left), len(right), device) if self.grams else None

    def _narrow(self, batched: Batched) -> list[Tensor]:
        return [x for x in batched.features if x.shape[1] <= self.width]

    def numbers(self) -> Numbers:
        """The likeness of every pair of layers that vary at all."""
        self._settle()
        sides = (self.left, self.right)
        rows, columns = (self._varying(number) for number in (0, 1))
        labels = [[side.labels()[place] for place in side.layers] for side in sides]
        matrix, exact = self._estimates(), torch.zeros(len(labels[0]), len(labels[1]), dtype=torch.bool)
        if self.moments is not None:
            narrow = [side.narrow(self.width) for side in sides]
            own = [
                {k: self._own(side, number, k) for number, k in enumerate(ks) if k in varying}
                for side, (ks, varying) in enumerate(zip(narrow, (rows, columns), strict=True))
            ]
            for (x, i), (y, j) in product(enumerate(narrow[0]), enumerate(narrow[1])):
                if i in own[0] and j in own[1]:
                    matrix[i, j] = self.measure.joint(own[0][i], own[1][j], self.moments.pair(x, y))
                    exact[i, j] = True
        return Numbers(
            matrix.cpu()[rows][:, columns],
            tuple(labels[0][i] for i in rows),
            tuple(labels[1][j] for j in columns),
            self.n,
            exact[rows][:, columns],
            self._left_out((rows, columns), labels),
        )

    def _own(self, side: int, number: int, k: int) -> Any:
        """What the measure needs of layer `k` of a model alone, whose moments are those with that number."""
        assert self.moments is not None
        moments = self.moments.own(side, number)
        layer = list((self.left, self.right)[side].layers.values())[k]
        return self.measure.own(moments, rounding(moments, layer.origin.to(moments.device), layer.precision))

    def _settle(self) -> None:
        """Add what still waits for more samples; raise if there are too few in all."""
        least = LEAST if self.estimable else 2
        if self.n < least:
            raise ValueError(f"loader gave {self.n} samples, and {self.by} needs {least} at least")
        widest = max((*self.left.layers.values(), *self.right.layers.values()), key=lambda layer: layer.width)
        if self.by in _CORRELATIONS and widest.width >= self.n:
            raise ValueError(
                f"{self.by} is 1 for any layer with as many features as there are samples, and {widest.place} has"
                f" {widest.width} for {self.n}; pass pool='mean', more samples, or by='svcca' or 'cka'"
            )
        if self.alignments is not None:
            grams = [layer.last_grams() for layer in self.left.layers.values()]
            others = grams
            if self.right is not self.left:
                others = [layer.last_grams() for layer in self.right.layers.values()]
            self.alignments.add(grams, others)
        if self.moments is not None:
            self.moments.settle()

    def _estimates(self) -> Tensor:
        if self.alignments is None:
            return torch.zeros(len(self.left.layers), len(self.right.layers), dtype=torch.float64)
        x, y = self.alignments.own
        return self.alignments.cross / torch.outer(x.sqrt(), y.sqrt())

    def _varying(self, number: int) -> list[int]:
        """Which layers of a model say something of the samples; raise for one that gives NaN or Inf."""
        side = (self.left, self.right)[number]
        narrow = {k: place for place, k in enumerate(side.narrow(self.width))} if self.moments is not None else {}
        varying = []
        for k, layer in enumerate(side.layers.values()):
            if self.moments is not None and k in narrow:
                varies = self._varies(self.moments.own(number, narrow[k]), layer)
            else:
                assert self.alignments is not None
                own, raw = float(self.alignments.own[number][k]), float(self.alignments.raw[number][k])
                least = self.alignments.samples * layer.noise**2
                varies = own > (_ROUNDING * layer.eps) ** 2 * raw and own > least**2 if math.isfinite(own) else None
            if varies is None:
                raise ValueError(
                    f"{layer.place} of model {side.name} gave values that are not finite, or too large to be squared;"
                    " torchhook.diagnose tells where they come from, sites= leaves it out"
                )
            if varies:
                varying.append(k)
        if not varying:
            raise ValueError(f"no layer of model {side.name} can be compared: {_CONSTANT}, for each")
        return varying

    def _varies(self, moments: Tensor, layer: Layer) -> bool | None:
        """Whether a layer with these moments gives different features; None if they are not finite."""
        covariance = centred(moments)
        spread = float(covariance.trace())
        if not math.isfinite(spread):
            return None
        least = self.n * layer.noise**2
        if self.estimable:  # of samples that differ in one alone, no two have anything in common
            left = float(unbiased(moments))
            if not math.isfinite(left):
                return None
            return left > least * spread and left > _CANCELLED * float(moments[:-2, :-2].square().sum())
        return spread > least

    def _left_out(self, kept: Sequence[list[int]], labels: Sequence[list[str]]) -> dict[str, str]:
        """Why layers of either model have no row or column."""
        reasons: dict[str, str] = {}
        both = zip((self.left, self.right), kept, labels, strict=True)
        for side, varying, names in list(both)[: 1 if self.right is self.left else 2]:
            of = "" if self.right is self.left else f" of {side.name}"
            known = side.labels()
            reasons |= {f"{path or repr('')}{of}": why for path, why in side.gathering.silent.items()}
            reasons |= {f"{known[place]}{of}": why for place, why in side.left_out.items()}
            reasons |= {f"{name}{of}": _CONSTANT for k, name in enumerate(names) if k not in varying}
        return reasons

    def _require_exact(self) -> None:
        if self.estimable:
            return
        widest = max((*self.left.layers.values(), *self.right.layers.values()), key=lambda layer: layer.width)
        if widest.width > self.width:
            what = self.by if self.by != "cka" else "cka with debiased=False"
            raise BudgetError(
                f"{what} needs all moments of all layers, which take more than max_bytes ({in_units(self.max_bytes)}):"
                f" {widest.place} alone has {widest.width} features a sample; pass pool='mean', fewer sites, or more"
                " max_bytes"
            )
