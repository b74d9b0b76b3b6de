"""Run two models batch by batch, sum up the features of their layers, and compute one number per pair of layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchhook.compare.accumulators import LEAST, Alignments, LayerFeatures, PairMoments, Products, exact_width
from torchhook.compare.features import FeatureReader, LayerCall
from torchhook.compare.measures import DEBIASED_CKA, MEASURES, centred, rounding, unbiased
from torchhook.core.errors import BudgetError
from torchhook.core.text import in_units

_SAME = "a model must call the same layers in every batch; select layers for which it does with sites="
_CONSTANT = "up to its precision, its output is the same for every sample, or for all but one"
_ROUNDING = 16  # machine epsilons of inner products: smaller variations count as rounding
_CANCELLED = 2**10 * torch.finfo(torch.float64).eps  # less than this after cancellation is not right to 0.1 %
_CORRELATIONS = ("cca", "pwcca")  # always 1 once there are as many features as samples


class Batched(NamedTuple):
    """One batch in a model: the features of its narrow layers, and the inner products of samples in all layers."""

    features: list[Tensor]
    grams: list[list[Tensor]]


class PairwiseResult(NamedTuple):
    """The fields of `Likeness` that are computed here."""

    matrix: Tensor
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    n: int
    exact: Tensor
    left_out: dict[str, str]


class ModelLayers:
    """One of the models and its layers in execution order."""

    def __init__(self, reader: FeatureReader, name: str, products: Products) -> None:
        self.reader = reader
        self.name = name
        self.products = products
        self.count = 0  # samples in the latest batch
        self.layers: dict[LayerCall, LayerFeatures] = {}
        self.left_out: dict[LayerCall, str] = {}

    @property
    def widths(self) -> list[int]:
        """The number of features per sample, by layer."""
        return [layer.width for layer in self.layers.values()]

    def narrow(self, width: int) -> list[int]:
        """The numbers of the layers that are at most `width` wide."""
        return [number for number, own in enumerate(self.widths) if own <= width]

    def labels(self) -> dict[LayerCall, str]:
        """The names of the layers: the path, and the call if there are several."""
        calls: dict[str, int] = {}
        for path, _ in (*self.layers, *self.left_out):
            calls[path] = calls.get(path, 0) + 1
        return {
            layer_call: (layer_call.path or "''") + (f" (call {layer_call.call})" if calls[layer_call.path] > 1 else "")
            for layer_call in (*self.layers, *self.left_out)
        }

    def run(self, batch: Any, is_narrow: Callable[[int], bool], grams: bool) -> Batched:
        """Run a batch and collect the features of layers that are narrow and, if `grams`, the inner products of all.

        The first batch determines which layers there are.
        """
        batched, met = Batched([], []), list[LayerCall]()
        is_first = not self.layers

        def take(layer_call: LayerCall, rows: Tensor | str) -> None:
            if is_first:
                self._meet(layer_call, rows)
            layer = self.layers.get(layer_call)
            if layer is None or isinstance(rows, str):
                if layer is not None or layer_call not in self.left_out:
                    raise ValueError(f"{layer_call} of model {self.name} is not as in the first batch: {_SAME}")
                return
            met.append(layer_call)
            layer.require_width(rows)
            if is_narrow(layer.width):
                batched.features.append(rows.clone())  # the model may overwrite them
            if grams:
                self.products.add(layer, layer.groups(rows))

        self.count = self.reader.run(batch, take)
        batched.grams.extend(self.products.settle())
        if met != list(self.layers):
            missing = next((layer_call for layer_call in self.layers if layer_call not in met), None)
            what = "calls its layers in another order" if missing is None else f"does not call {missing}"
            raise ValueError(f"model {self.name} {what} in a later batch than the first: {_SAME}")
        if not self.layers:
            reasons = "; ".join(f"{layer_call}: {why}" for layer_call, why in self.left_out.items())
            raise ValueError(f"no layer of model {self.name} can be compared: {reasons}")
        return batched

    def last_grams(self) -> list[list[Tensor]]:
        """The inner products of samples that still wait after the last batch."""
        for layer in self.layers.values():
            self.products.add(layer, layer.last_groups())
        return self.products.settle()

    def _meet(self, layer_call: LayerCall, rows: Tensor | str) -> None:
        if isinstance(rows, str):
            self.left_out[layer_call] = rows
        else:
            self.layers[layer_call] = LayerFeatures(layer_call, rows)


class Tally:
    """The running sums over every pair of layers."""

    def __init__(self, sides: Sequence[ModelLayers], by: str, debiased: bool, max_bytes: int) -> None:
        self.left, self.right = sides[0], sides[-1]
        self.by = by
        self.estimable = by == "cka" and debiased
        self.measure = DEBIASED_CKA if self.estimable else MEASURES[by]
        self.max_bytes = max_bytes
        self.n = 0
        self.width = 0  # of the widest layers that keep moments, known after the first batch
        self.grams = self.estimable
        self.moments: PairMoments | None = None
        self.alignments: Alignments | None = None

    def add(self, batch: Any) -> None:
        """Run both models on one batch and add their features."""
        x = self.left.run(batch, self._is_narrow, self.grams)
        y = x if self.right is self.left else self.right.run(batch, self._is_narrow, self.grams)
        if not self.n:
            self._begin()
        self.n += self.left.count
        if self.moments is not None:
            features = self._narrow(x)
            self.moments.add(features, features if y is x else self._narrow(y))
        if self.alignments is not None:
            self.alignments.add(x.grams, y.grams)

    def _is_narrow(self, width: int) -> bool:
        """Whether a layer keeps moments; in the first batch, whether it would if there were no further layers."""
        return width <= (self.width if self.n else exact_width(self.left.widths, self.right.widths, self.max_bytes))

    def _begin(self) -> None:
        """Decide which layers keep moments, now that the widths are known."""
        left, right = self.left.widths, self.right.widths
        self.width = exact_width(left, right, self.max_bytes)
        self._require_exact()
        device = next(iter(self.left.layers.values())).device
        x, y = (
            [layer for layer in side.layers.values() if layer.width <= self.width] for side in (self.left, self.right)
        )
        self.moments = PairMoments(x, y, device) if x and y else None
        self.grams = max(*left, *right) > self.width
        self.alignments = Alignments(len(left), len(right), device) if self.grams else None

    def _narrow(self, batched: Batched) -> list[Tensor]:
        return [x for x in batched.features if x.shape[1] <= self.width]

    def numbers(self) -> PairwiseResult:
        """The similarity of every pair of layers that vary at all."""
        self._settle()
        sides = (self.left, self.right)
        rows, columns = (self._varying(number) for number in (0, 1))
        labels = [[side.labels()[layer_call] for layer_call in side.layers] for side in sides]
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
        return PairwiseResult(
            matrix.cpu()[rows][:, columns],
            tuple(labels[0][i] for i in rows),
            tuple(labels[1][j] for j in columns),
            self.n,
            exact[rows][:, columns],
            self._left_out((rows, columns), labels),
        )

    def _own(self, side: int, number: int, k: int) -> Any:
        """What the measure prepares of layer `k` of a model, whose moments have that number."""
        assert self.moments is not None
        moments = self.moments.own(side, number)
        layer = list((self.left, self.right)[side].layers.values())[k]
        return self.measure.own(moments, rounding(moments, layer.origin.to(moments.device), layer.precision))

    def _settle(self) -> None:
        """Add the samples that still wait; raise if there are too few in total."""
        least = LEAST if self.estimable else 2
        if self.n < least:
            raise ValueError(f"loader has {self.n} samples, but {self.by} needs at least {least}")
        widest = max((*self.left.layers.values(), *self.right.layers.values()), key=lambda layer: layer.width)
        if self.by in _CORRELATIONS and widest.width >= self.n:
            raise ValueError(
                f"{self.by} is 1 for every layer with as many features as samples, and {widest.layer_call} has"
                f" {widest.width} features for {self.n} samples; pass pool='mean', more samples, or by='svcca' or 'cka'"
            )
        if self.alignments is not None:
            grams = self.left.last_grams()
            self.alignments.add(grams, grams if self.right is self.left else self.right.last_grams())
        if self.moments is not None:
            self.moments.settle()

    def _estimates(self) -> Tensor:
        if self.alignments is None:
            return torch.zeros(len(self.left.layers), len(self.right.layers), dtype=torch.float64)
        x, y = self.alignments.own
        return self.alignments.cross / torch.outer(x.sqrt(), y.sqrt())

    def _varying(self, number: int) -> list[int]:
        """The numbers of the layers of a model that vary between samples; raise if one has NaN or Inf."""
        side = (self.left, self.right)[number]
        narrow = (
            {k: layer_call for layer_call, k in enumerate(side.narrow(self.width))} if self.moments is not None else {}
        )
        alignments = self.alignments
        own, raw = (
            ([], []) if alignments is None else (alignments.own[number].tolist(), alignments.raw[number].tolist())
        )
        varying = []
        for k, layer in enumerate(side.layers.values()):
            if self.moments is not None and k in narrow:
                varies = self._varies(self.moments.own(number, narrow[k]), layer)
            else:
                assert alignments is not None
                least = max((_ROUNDING * layer.eps) ** 2 * raw[k], (alignments.samples * layer.noise**2) ** 2)
                varies = own[k] > least if math.isfinite(own[k]) else None
            if varies is None:
                raise ValueError(
                    f"{layer.layer_call} of model {side.name} has values that are not finite, or too large to square;"
                    " torchhook.diagnose finds their origin, and sites= can leave the layer out"
                )
            if varies:
                varying.append(k)
        if not varying:
            raise ValueError(f"no layer of model {side.name} can be compared; for each of them: {_CONSTANT}")
        return varying

    def _varies(self, moments: Tensor, layer: LayerFeatures) -> bool | None:
        """Whether the features of a layer with these moments vary; None if they are not finite."""
        covariance = centred(moments)
        spread = float(covariance.trace())
        if not math.isfinite(spread):
            return None
        least = self.n * layer.noise**2
        if self.estimable:  # if only one sample differs, no two others have anything in common
            left = float(unbiased(moments))
            if not math.isfinite(left):
                return None
            return left > least * spread and left > _CANCELLED * float(moments[:-2, :-2].square().sum())
        return spread > least

    def _left_out(self, kept: Sequence[list[int]], labels: Sequence[list[str]]) -> dict[str, str]:
        """Why some layers of either model have no row or column."""
        reasons: dict[str, str] = {}
        both = zip((self.left, self.right), kept, labels, strict=True)
        for side, varying, names in list(both)[: 1 if self.right is self.left else 2]:
            of = "" if self.right is self.left else f" of {side.name}"
            known = side.labels()
            reasons |= {f"{path or repr('')}{of}": why for path, why in side.reader.silent.items()}
            reasons |= {f"{known[layer_call]}{of}": why for layer_call, why in side.left_out.items()}
            reasons |= {f"{name}{of}": _CONSTANT for k, name in enumerate(names) if k not in varying}
        return reasons

    def _require_exact(self) -> None:
        if self.estimable:
            return
        widest = max((*self.left.layers.values(), *self.right.layers.values()), key=lambda layer: layer.width)
        if widest.width > self.width:
            what = self.by if self.by != "cka" else "cka with debiased=False"
            raise BudgetError(
                f"{what} needs the moments of all layers, which take more than max_bytes ({in_units(self.max_bytes)}):"
                f" {widest.layer_call} alone has {widest.width} features per sample; pass pool='mean', fewer sites, or"
                " a larger max_bytes"
            )
