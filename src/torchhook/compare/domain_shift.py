"""`shift`: how far the data of two domains are apart in the features of one layer."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.compare import distances
from torchhook.compare.features import FeatureReader, LayerCall, Pool, require_pool
from torchhook.core.batch import InputBatches, ToInputs, batch_count
from torchhook.core.progress import Progress, track
from torchhook.core.selection import Query, require_module, require_sites
from torchhook.core.tap import require_count
from torchhook.core.text import html_table, table

_SHOWN = 10  # channels in a table


class Drift(NamedTuple):
    """How one channel differs between source and target.

    `shift` is the difference of the means (target minus source) in standard deviations, `variance_ratio` is target over
    source, and `distance` combines both: the Fréchet distance of the channel alone, in standard deviations.
    """

    channel: int
    shift: float
    variance_ratio: float
    distance: float


@dataclass(frozen=True, eq=False, repr=False)
class Shift:
    """How far target data is from source data at one layer of a model; all distances are 0 if nothing differs.

    Args:
        site: The path of the layer.
        sources, targets: How many samples were compared.
        p_value: The probability, by permutations, of an `mmd` this large if both come from the same distribution.
        mmd: Squared maximum mean discrepancy with a Gaussian kernel, unbiased; `mmd_biased` is its V-statistic.
        energy: Energy distance, unbiased; `energy_biased` is its V-statistic.
        coral: The squared difference of the covariances over 4d².
        frechet: The Fréchet distance of the normal distributions (squared, as in FID); too large for few samples.
        auc: How well a linear classifier separates target from source, from 0.5 (not at all) to 1.
        channels: All channels, those that differ most first.
    """

    site: str
    sources: int
    targets: int
    p_value: float
    mmd: float
    mmd_biased: float
    energy: float
    energy_biased: float
    coral: float
    frechet: float
    auc: float
    channels: tuple[Drift, ...]

    def table(self) -> list[dict[str, Any]]:
        """One plain dictionary per channel, for pandas and similar tools."""
        return [channel._asdict() for channel in self.channels]

    def __repr__(self) -> str:
        measures, channels = (table(header, rows) for header, rows in self._tables())
        return f"{self._title()}\n{measures}\n\n{self._most()}\n{channels}"

    def _repr_html_(self) -> str:
        measures, channels = (html_table(header, rows) for header, rows in self._tables())
        return f"<p>{html.escape(self._title())}</p>{measures}<p>{self._most()}</p>{channels}"

    def _title(self) -> str:
        return (
            f"Shift at {self.site or 'the model'!r}: {self.sources} source and {self.targets} target samples,"
            f" p = {self.p_value:.2g}"
        )

    def _most(self) -> str:
        most = min(_SHOWN, len(self.channels))
        return f"The {most} of {len(self.channels)} channels that differ most"

    def _tables(self) -> list[tuple[tuple[str, ...], list[list[str]]]]:
        names = ("mmd", "energy", "coral", "frechet", "auc")
        channels = [
            [str(drift.channel), f"{drift.shift:+.3f}", f"{drift.variance_ratio:.3g}", f"{drift.distance:.3f}"]
            for drift in self.channels[:_SHOWN]
        ]
        return [
            (("measure", "value"), [[name, f"{getattr(self, name):.4g}"] for name in names]),
            (("channel", "shift", "variance ratio", "distance"), channels),
        ]


def shift(
    model: nn.Module,
    source: Any,
    target: Any,
    site: Query,
    *,
    call: int | None = None,
    pool: Pool = "mean",
    permutations: int = 999,
    max_samples: int = 2000,
    generator: torch.Generator | None = None,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Shift:
    """How far the data of `target` is from that of `source` at the layer `site`, and in which channels.

    Args:
        source, target: Yield batches: tensors, tuples whose last element is a target, or mappings of keyword arguments.
        site: A query for one layer.
        call: The number of the call, if the model calls the layer several times.
        pool: How an output becomes the features of a sample: ``"mean"`` takes the mean of each channel over all
            positions, ``"flatten"`` all values; or a function of the output, such as ``lambda x: x[:, 0]``.
        permutations: For the p-value, which is at least 1 / (1 + permutations).
        max_samples: How many samples of each data set are kept, drawn at random.
        generator: Draws samples and permutations; by default with the same seed every time.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook.compare.domain_shift import shift
    >>> model = nn.Flatten()
    >>> draw = torch.Generator().manual_seed(0)
    >>> source, target = torch.randn(60, 5, generator=draw), torch.randn(40, 5, generator=draw)
    >>> target[:, 3] += 2
    >>> result = shift(model, source.split(16), target.split(16), "")
    >>> result.p_value, result.channels[0].channel
    (0.001, 3)
    """
    require_module(model)
    source = InputBatches(source, model, batch_to_inputs, "source")
    target = InputBatches(target, model, batch_to_inputs, "target")
    require_pool(pool)
    require_sites(model, site, "site")
    require_count(permutations, "permutations")
    require_count(max_samples, "max_samples")
    draw = torch.Generator().manual_seed(0) if generator is None else generator
    with FeatureReader(model, site, pool) as reader:
        layer_call, x = _features(reader, source, "source", call, max_samples, draw, progress)
        _, y = _features(reader, target, "target", call, max_samples, draw, progress)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{layer_call} has {x.shape[1]} features per sample for source and {y.shape[1]} for target; pass"
            " pool='mean' or a function that makes them equal"
        )
    return _compared(layer_call, x, y, permutations, draw)


def _compared(layer_call: LayerCall, x: Tensor, y: Tensor, permutations: int, draw: torch.Generator) -> Shift:
    squared = distances.squared_distances(torch.cat([x, y]))
    width = distances.bandwidth(squared)
    if not width > 0:
        raise ValueError(
            f"the output of {layer_call} is the same for every sample of source and target: nothing to compare"
        )
    kernel = torch.exp(-squared / width)
    mmd, energy = distances.between(kernel, len(x)), distances.between(-squared.sqrt(), len(x))
    return Shift(
        site=layer_call.path,
        sources=len(x),
        targets=len(y),
        p_value=distances.p_value(kernel, len(x), permutations, draw),
        mmd=mmd.u,
        mmd_biased=mmd.v,
        energy=energy.u,
        energy_biased=energy.v,
        coral=distances.coral(x, y),
        frechet=distances.frechet(x, y),
        auc=distances.classifier_auc(x, y, draw),
        channels=_drifts(x, y),
    )


def _drifts(x: Tensor, y: Tensor) -> tuple[Drift, ...]:
    """The channels, those that differ most first."""
    (x_var, x_mean), (y_var, y_mean) = torch.var_mean(x, 0), torch.var_mean(y, 0)
    scale = ((x_var + y_var) / 2).sqrt()
    off = y_mean - x_mean
    apart = (off.square() + (y_var.sqrt() - x_var.sqrt()).square()).sqrt()
    # constant channels that differ are infinitely far apart; equal ones have distance 0
    columns = [_over(off, scale), _over(y_var, x_var, same=1.0), _over(apart, scale)]
    drifts = [Drift(k, *row) for k, row in enumerate(torch.stack(columns, 1).tolist())]
    return tuple(sorted(drifts, key=lambda drift: -drift.distance))


def _over(a: Tensor, b: Tensor, same: float = 0.0) -> Tensor:
    return torch.where((a == 0) & (b == 0), torch.full_like(a, same), a / b)


def _features(
    reader: FeatureReader,
    loader: Iterable[Any],
    name: str,
    call: int | None,
    most: int,
    draw: torch.Generator,
    progress: Progress,
) -> tuple[LayerCall, Tensor]:
    """The layer call, and its features for all samples of a loader, or for `most` drawn at random."""
    drawn: Reservoir | None = None
    found: dict[LayerCall, Tensor | str] = {}
    for batch in track(loader, batch_count(loader), name, progress):
        found.clear()
        reader.run(batch, lambda layer_call, rows: found.update({layer_call: _copied(rows)}))
        layer_call, rows = _chosen(found, call)
        drawn = drawn or Reservoir(most, draw)
        drawn.add(layer_call, rows)
    if drawn is None or drawn.rows is None or len(drawn.rows) < distances.FOLDS:
        raise ValueError(f"{name} has {0 if drawn is None else drawn.seen} samples, but {distances.FOLDS} are needed")
    if not drawn.rows.isfinite().all():
        raise ValueError(
            f"{layer_call} has values that are not finite for {name}; torchhook.diagnose finds their origin"
        )
    return layer_call, drawn.rows


def _copied(rows: Tensor | str) -> Tensor | str:
    """A copy of the features: the model may overwrite its output."""
    return rows if isinstance(rows, str) else rows.to(torch.float64, copy=True)


def _chosen(found: dict[LayerCall, Tensor | str], call: int | None) -> tuple[LayerCall, Tensor]:
    """The only layer call, or the one asked for, with its features."""
    paths = list(dict.fromkeys(layer_call.path for layer_call in found))
    if len(paths) > 1:
        raise ValueError(f"site must select one layer, but matches {', '.join(map(repr, paths[:5]))}")
    wanted = [layer_call for layer_call in found if call is None or layer_call.call == call]
    if len(wanted) > 1:
        raise ValueError(f"{paths[0]!r} is called {len(wanted)} times per batch: pass call=, counted from 0")
    if not wanted:
        what = "was not called" if call is None else f"has no call {call}"
        raise ValueError(f"site {what} in a batch; it was called {len(found)} times")
    rows = found[wanted[0]]
    if isinstance(rows, str):
        raise ValueError(f"{wanted[0]} cannot be compared: {rows}")
    return wanted[0], rows


class Reservoir:
    """A random sample of at most `most` rows: each row gets a random number, and the smallest stay."""

    def __init__(self, most: int, draw: torch.Generator) -> None:
        self.most = most
        self.draw = draw
        self.seen = 0
        self.rows: Tensor | None = None
        self._chances = torch.zeros(0, dtype=torch.float64)

    def add(self, layer_call: LayerCall, rows: Tensor) -> None:
        """Keep some of `rows`, perhaps instead of others."""
        if self.rows is not None and rows.shape[1] != self.rows.shape[1]:
            raise ValueError(
                f"{layer_call} had {self.rows.shape[1]} features per sample and now has {rows.shape[1]}; pass"
                " pool='mean' for one feature per channel"
            )
        self.seen += len(rows)
        chances = torch.rand(len(rows), generator=self.draw, dtype=torch.float64)
        chances = torch.cat([self._chances, chances])
        rows = rows if self.rows is None else torch.cat([self.rows, rows])
        if len(rows) > self.most:
            least = chances.topk(self.most, largest=False, sorted=False).indices
            chances, rows = chances[least], rows[least.to(rows.device)]
        self._chances, self.rows = chances, rows
