"""`cka`: how similar every pair of layers of two models is, in one pass over a data set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from torchhook.compare.accumulators import Products
from torchhook.compare.features import FeatureReader, Pool, require_pool
from torchhook.compare.measures import MEASURES
from torchhook.compare.pairwise import ModelLayers, Tally
from torchhook.core.batch import InputBatches, ToInputs, batch_count
from torchhook.core.parts import Matrix, Table
from torchhook.core.progress import Progress, track
from torchhook.core.result import Result
from torchhook.core.selection import Sites, require_module, require_sites
from torchhook.core.text import warn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

By = Literal["cka", "cca", "svcca", "pwcca", "procrustes"]


@dataclass(frozen=True, eq=False, repr=False)
class Likeness(Result):
    """How similar layers are: one row per layer of the first model, one column per layer of the second.

    Args:
        matrix: rows × columns, in float64; 1 means the same up to a rotation and a scale.
        rows, columns: The paths of the layers in execution order, with the call if a module is called several times.
        by: The measure.
        n: The number of samples.
        exact: rows × columns, whether a number is exact for these samples or an unbiased estimate from groups of them.
        left_out: Layers without a row or column, and why.

    >>> result = Likeness(torch.tensor([[0.9, 0.2]]), ("fc",), ("a", "b"), "cka", 100, torch.ones(1, 2).bool())
    >>> result
    cka of 1 × 2 layers, 100 samples
    layer  nearest    cka
    fc     a        0.900
    """

    matrix: Tensor
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    by: str
    n: int
    exact: Tensor
    left_out: dict[str, str] = field(default_factory=dict)
    itself: bool = False  # whether the columns are the same layers as the rows

    def _records(self) -> list[dict[str, Any]]:
        """One row per pair of layers."""
        return [
            {"path": row, "paired": column, self.by: float(self.matrix[i, j]), "exact": bool(self.exact[i, j])}
            for i, row in enumerate(self.rows)
            for j, column in enumerate(self.columns)
        ]

    def _figures(self) -> list[Matrix]:
        title = "Similarity of layers" if self.itself else "Similarity of layers of a (rows) and b (columns)"
        return [Matrix(self.matrix, self.rows, self.columns, self.by, title)]

    def _tables(self) -> list[Table]:
        """Each layer with the most similar one: the matrix has the pairs."""
        return [Table(["path", "nearest", self.by], self._nearest(), "Nearest layers")]

    def figure(self, ax: Axes | None = None) -> Figure:
        """The matrix as a heat map; see `torchhook.plot.similarity`."""
        from torchhook.plot import similarity

        return similarity(self, ax=ax)

    def _title(self) -> str:
        estimated = int((~self.exact).sum())
        how = f", {estimated} of {self.exact.numel()} numbers estimated from groups of samples" if estimated else ""
        out = f", {len(self.left_out)} layers left out (see .left_out)" if self.left_out else ""
        return f"{self.by} of {len(self.rows)} × {len(self.columns)} layers, {self.n} samples{how}{out}"

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        header = ("layer", "nearest other" if self.itself else "nearest", self.by.rjust(5))
        return header, [[name, nearest, f"{value:.3f}"] for name, nearest, value in self._nearest()]

    def _nearest(self) -> list[list[Any]]:
        """Each layer, the most similar one, and how similar it is."""
        matrix = self.matrix.clone()
        if self.itself:
            matrix.fill_diagonal_(-torch.inf)
        pairs = enumerate(matrix.argmax(1).tolist())
        return [[self.rows[i], self.columns[j], float(self.matrix[i, j])] for i, j in pairs]


def cka(
    a: nn.Module,
    b: nn.Module | None,
    loader: Any,
    sites: Sites = None,
    *,
    sites_b: Sites = None,
    by: By = "cka",
    debiased: bool = True,
    pool: Pool = "flatten",
    max_bytes: int = 2**28,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Likeness:
    """How similar every pair of layers of `a` and `b` is on the samples of `loader`, in one pass.

    The models may have any architectures and widths. Both run in eval mode on the same batches, moved to the device and
    cast to the dtype of each. Memory does not grow with the data set. If the moments of two layers fit into
    `max_bytes`, their similarity is exactly that of the whole data set, for any batch sizes. Wider layers are compared
    in groups of 32 to 256 samples, which gives an unbiased estimate of the same; ``result.exact`` says which it is.

    Args:
        b: The second model; None, or `a` itself, compares the layers of `a` with one another.
        loader: Yields batches: tensors, tuples whose last element is a target, or mappings of keyword arguments.
        sites, sites_b: Queries for the layers of `a` and of `b`. None means every leaf module, and for `b` the same
            queries as for `a`.
        by: ``"cka"``, linear centred kernel alignment; ``"cca"``, the mean canonical correlation; ``"svcca"``, the same
            for the directions that hold 99 % of the variance; ``"pwcca"``, the same weighted by what each direction
            accounts for in the layer with fewer directions, else in that of `a`; ``"procrustes"``, the nuclear norm of
            X'Y for layers of norm 1 (the squared distance after the best rotation is two minus twice that).
        debiased: Correct CKA for the number of features; without the correction it is too high for few samples.
        pool: How an output becomes the features of a sample: ``"flatten"`` takes all of it, ``"mean"`` the mean of
            each channel over all positions; or a function of the output, such as ``lambda x: x[:, 0]``.
        max_bytes: Memory for the moments of narrow layers. More makes wider layers exact; 0 estimates all.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook.compare.likeness import cka
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Tanh())
    >>> batches = torch.randn(64, 4, generator=torch.Generator().manual_seed(0)).split(10)
    >>> result = cka(model, None, batches)
    >>> result.rows, result.n, bool(result.exact.all())
    (('0', '1', '2'), 64, True)
    >>> [round(float(number), 6) for number in result.matrix.diagonal()]
    [1.0, 1.0, 1.0]
    """
    second = None if b is a else b
    _require(a, second, by, pool, max_bytes)
    loader = InputBatches(loader, a, batch_to_inputs)
    require_sites(a, sites, "sites")
    named = sites if sites_b is None else sites_b
    if second is not None:
        hint = "; pass sites_b= for the layers of the second model" if sites_b is None else ""
        require_sites(second, named, "sites_b", hint)
    elif sites_b is not None:
        raise ValueError("sites_b needs a second model: without one, the layers of sites are compared with one another")
    other = nullcontext() if second is None else FeatureReader(second, named, pool)
    with FeatureReader(a, sites, pool) as left, other as right:
        products = Products()
        readers = ((left, "a"), (right, "b"))
        sides = [ModelLayers(reader, name, products) for reader, name in readers if reader is not None]
        tally = Tally(sides, by, debiased, max_bytes)
        for batch in track(loader, batch_count(loader), by, progress):
            tally.add(batch)
        if not tally.n:
            raise ValueError("loader has no samples")
    numbers = tally.numbers()
    if numbers.left_out and not sites is sites_b is None:
        warn("left out: " + "; ".join(f"{name}: {why}" for name, why in numbers.left_out.items()))
    return Likeness(by=by, itself=second is None, **numbers._asdict())


def _require(a: Any, b: Any, by: Any, pool: Any, max_bytes: Any) -> None:
    require_module(a, "a")
    if b is not None:
        require_module(b, "b")
    require_pool(pool)
    if by not in MEASURES:
        raise ValueError(f"by must be one of {', '.join(map(repr, MEASURES))}, not {by!r}")
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0:
        raise ValueError(f"max_bytes must be a number of bytes, not {max_bytes!r}")
