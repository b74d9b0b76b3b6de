"""`shift`: how far the data of two domains are apart in the features of one layer, or of several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.compare import distances
from torchhook.compare.features import FeatureReader, LayerCall, Pool, require_pool
from torchhook.compare.layer_samples import LayerSamples, read_samples
from torchhook.core.batch import InputBatches, ToInputs
from torchhook.core.cards import boxed, text
from torchhook.core.errors import NotRecordedError
from torchhook.core.parts import Bars, Table
from torchhook.core.progress import Progress
from torchhook.core.renamed import renamed
from torchhook.core.result import Result
from torchhook.core.selection import Query, nearest, queries_of, require_module, require_sites, select
from torchhook.core.tap import require_count
from torchhook.core.text import html_table, table

_SHOWN = 10  # channels in a table
_MEASURES = ("mmd", "energy", "coral", "frechet", "auc", "mean_distance")


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
class Shift(Result):
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
        mean_distance: The norm of the difference of the mean features, over all samples.
        share: Of the `mean_distance` of all layers that were asked for together, from 0 to 1.
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
    mean_distance: float
    share: float = 1.0

    def _records(self) -> list[dict[str, Any]]:
        return [{"path": self.site, **channel._asdict()} for channel in self.channels]

    def __repr__(self) -> str:
        measures, channels = (table(header, rows) for header, rows in self._both())
        return f"{self._title()}\n{measures}\n\n{self._most()}\n{channels}"

    def _repr_html_(self) -> str:
        measures, channels = (html_table(header, rows) for header, rows in self._both())
        return boxed(f"<p>{text(self._title())}</p>{measures}<p>{self._most()}</p>{channels}")

    def _title(self) -> str:
        return (
            f"Shift at {self.site or 'the model'!r}: {self.sources} source and {self.targets} target samples,"
            f" p = {self.p_value:.2g}"
        )

    def _most(self) -> str:
        most = min(_SHOWN, len(self.channels))
        return f"The {most} of {len(self.channels)} channels that differ most" + (
            ": see .table() for all" if most < len(self.channels) else ""
        )

    def _tables(self) -> list[Table]:
        measures = [{"measure": name, "value": getattr(self, name)} for name in _MEASURES]
        return [Table.of(measures, "Measures"), Table.of(self._records(), "Channels")]

    def _both(self) -> list[tuple[tuple[str, ...], list[list[str]]]]:
        channels = [
            [str(drift.channel), f"{drift.shift:+.3f}", f"{drift.variance_ratio:.3g}", f"{drift.distance:.3f}"]
            for drift in self.channels[:_SHOWN]
        ]
        return [
            (("measure", "value"), [[name, f"{getattr(self, name):.4g}"] for name in _MEASURES]),
            (("channel", "shift", "variance ratio", "distance"), channels),
        ]


@dataclass(frozen=True, eq=False, repr=False)
class Shifts(Result, Mapping[str, Shift]):
    """How far target data is from source data at several layers: the `Shift` of each, in execution order.

    The keys are the paths of the layers, with the call if a layer is called several times.

    Args:
        layers: The layers.
        left_out: Layers that could not be compared, and why.
    """

    layers: Mapping[str, Shift]
    left_out: Mapping[str, str]

    def __getitem__(self, layer: str) -> Shift:
        if layer not in self.layers:
            raise NotRecordedError(f"no layer {layer!r} was compared; {nearest(layer, self.layers)}")
        return self.layers[layer]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def ranked(self) -> list[Shift]:
        """The layers with the largest share first."""
        return sorted(self.layers.values(), key=lambda layer: -layer.share)

    def _records(self) -> list[dict[str, Any]]:
        names = ("share", "mean_distance", "p_value", "mmd", "energy", "coral", "frechet", "auc", "sources", "targets")
        return [{"path": key, **{name: getattr(one, name) for name in names}} for key, one in self.layers.items()]

    def _figures(self) -> list[Bars]:
        return [Bars(list(self), {"": [one.share for one in self.values()]}, "share of the mean distances", "Shares")]

    def _title(self) -> str:
        first = next(iter(self.layers.values()))
        return f"Shift at {len(self)} layers: {first.sources} source and {first.targets} target samples"

    def _foot(self) -> Sequence[str]:
        return [f"{len(self.left_out)} layers were left out: see .left_out"] if self.left_out else []

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        ranked = sorted(self.layers.items(), key=lambda item: -item[1].share)
        return ("layer", "share", "mean distance", "p", "mmd", "auc"), [
            [
                key or "''",
                f"{one.share:.3f}",
                f"{one.mean_distance:.4g}",
                f"{one.p_value:.2g}",
                f"{one.mmd:.4g}",
                f"{one.auc:.3f}",
            ]
            for key, one in ranked
        ]


@renamed(site="sites")
def shift(
    model: nn.Module,
    source: Any,
    target: Any,
    sites: Query | Iterable[Query],
    *,
    call: int | None = None,
    pool: Pool = "mean",
    permutations: int = 999,
    max_samples: int = 2000,
    generator: torch.Generator | None = None,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Shift | Shifts:
    """How far the data of `target` is from that of `source` at the layer `sites`, and in which channels.

    If `sites` selects several layers, or is a list, the result is a `Shifts`: the `Shift` of each layer, by path, with
    the share that each has in the distances of the mean features.

    Args:
        source, target: Yield batches: tensors, tuples whose last element is a target, or mappings of keyword arguments.
        sites: A query for one layer or for several, or a list of queries.
        call: The number of the call, if the model calls a layer several times.
        pool: How an output becomes the features of a sample: ``"mean"`` takes the mean of each channel over all
            positions, ``"flatten"`` all values; or a function of the output, such as ``lambda x: x[:, 0]``.
        permutations: For the p-value, which is at least 1 / (1 + permutations).
        max_samples: How many samples of each data set are kept, drawn at random.
        generator: Draws samples and permutations; by default with the same seed every time.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook.compare.domain_shift import shift
    >>> model = nn.Sequential(nn.Flatten(), nn.Tanh())
    >>> draw = torch.Generator().manual_seed(0)
    >>> source, target = torch.randn(60, 5, generator=draw), torch.randn(40, 5, generator=draw)
    >>> target[:, 3] += 2
    >>> result = shift(model, source.split(16), target.split(16), "0")
    >>> result.p_value, result.channels[0].channel
    (0.001, 3)
    >>> several = shift(model, source.split(16), target.split(16), ["0", nn.Tanh])
    >>> several["0"].p_value, [round(layer.share, 1) for layer in several.values()]
    (0.001, [0.7, 0.3])
    """
    require_module(model)
    source = InputBatches(source, model, batch_to_inputs, "source")
    target = InputBatches(target, model, batch_to_inputs, "target")
    require_pool(pool)
    require_sites(model, sites, "sites")
    require_count(permutations, "permutations")
    require_count(max_samples, "max_samples")
    start = torch.Generator().manual_seed(0) if generator is None else generator
    is_one = isinstance(sites, (str, nn.Module)) or not isinstance(sites, Iterable)
    is_one = is_one and len(select(model, *queries_of(sites))) == 1
    with FeatureReader(model, sites, pool) as reader:
        layers = read_samples(reader, {"source": source, "target": target}, call, max_samples, start, progress)
    if is_one:
        layer = _require_one(layers, call)
        one = _compared(layer, permutations)
        start.set_state(layer.draw.get_state())
        return one
    found, left_out = dict[LayerCall, Shift](), dict[str, str]()
    for layer_call, layer in layers.items():
        try:
            found[layer_call] = _compared(layer, permutations)
        except ValueError as error:
            left_out[str(layer_call)] = str(error)
        last = layer.draw
    if not found:
        raise ValueError("no layer can be compared: " + "; ".join(left_out.values()))
    start.set_state(last.get_state())
    return Shifts(_by_share(found), left_out | {repr(path): why for path, why in reader.silent.items()})


def _by_share(found: Mapping[LayerCall, Shift]) -> dict[str, Shift]:
    """The layers by name, each with its share in the distances of all means."""
    calls = Counter(layer_call.path for layer_call in found)
    total = sum(layer.mean_distance for layer in found.values())
    return {
        path + (f" (call {call})" if calls[path] > 1 else ""): replace(
            layer, share=layer.mean_distance / total if total else 0.0
        )
        for (path, call), layer in found.items()
    }


def _require_one(layers: Mapping[LayerCall, LayerSamples], call: int | None) -> LayerSamples:
    """The only layer call; raise if there is none, or if there are several."""
    if len(layers) > 1:
        path = next(iter(layers)).path
        raise ValueError(f"{path!r} is called {len(layers)} times per batch: pass call=, counted from 0")
    if not layers:
        raise ValueError("the layer was not called" if call is None else f"the layer has no call {call} (from 0)")
    return next(iter(layers.values()))


def _compared(layer: LayerSamples, permutations: int) -> Shift:
    x, y = layer.features()
    squared = distances.squared_distances(torch.cat([x, y]))
    width = distances.bandwidth(squared)
    if not width > 0:
        raise ValueError(
            f"the output of {layer.call} is the same for every sample of source and target: nothing to compare"
        )
    kernel = torch.exp(-squared / width)
    mmd, energy = distances.between(kernel, len(x)), distances.between(-squared.sqrt(), len(x))
    return Shift(
        site=layer.call.path,
        sources=len(x),
        targets=len(y),
        p_value=distances.p_value(kernel, len(x), permutations, layer.draw),
        mmd=mmd.u,
        mmd_biased=mmd.v,
        energy=energy.u,
        energy_biased=energy.v,
        coral=distances.coral(x, y),
        frechet=distances.frechet(x, y),
        auc=distances.classifier_auc(x, y, layer.draw),
        channels=_drifts(x, y),
        mean_distance=float((layer.sides["source"].mean - layer.sides["target"].mean).norm()),
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
