"""`shift`: how far the data of one domain is from that of another, as a layer of a model sees them."""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from torchhook.compare import distances
from torchhook.compare.features import Gathering, Place, Pool, require_pool
from torchhook.core.batch import batch_count, require_loader
from torchhook.core.progress import track
from torchhook.core.selection import Query, require_module, require_sites
from torchhook.core.tap import require_count
from torchhook.core.text import html_table, table

_TOLD = 10  # channels in a table


class Drift(NamedTuple):
    """How one channel differs between source and target.

    `shift` is the difference of the means (target less source) in units of the deviation, `variance_ratio` that of
    target over source, and `distance` what both come to: the Fréchet distance of the channel alone in those units.
    """

    channel: int
    shift: float
    variance_ratio: float
    distance: float


@dataclass(frozen=True, eq=False, repr=False)
class Shift:
    """How far target data is from source data at one place of a model; all distances are 0 where nothing differs.

    Args:
        site: The path of the layer.
        sources, targets: How many samples were compared.
        p_value: How probable an `mmd` as large as this is if both are drawn from the same; by permutations.
        mmd: Squared maximum mean discrepancy, Gaussian kernel, unbiased; `mmd_biased` is its V-statistic.
        energy: Energy distance, unbiased; `energy_biased` is its V-statistic.
        coral: The squared difference of the covariances over 4d².
        frechet: The Fréchet distance of the normal distributions (squared, as in FID); too large for few samples.
        auc: How well a linear classifier tells target from source, from 0.5, not at all, to 1.
        channels: All channels, the one that differs most first.
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
        """The channels as plain dictionaries, for pandas and the like."""
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
        most = min(_TOLD, len(self.channels))
        return f"The {most} of {len(self.channels)} channels that differ most"

    def _tables(self) -> list[tuple[tuple[str, ...], list[list[str]]]]:
        names = ("mmd", "energy", "coral", "frechet", "auc")
        channels = [
            [str(drift.channel), f"{drift.shift:+.3f}", f"{drift.variance_ratio:.3g}", f"{drift.distance:.3f}"]
            for drift in self.channels[:_TOLD]
        ]
        return [
            (("measure", "value"), [[name, f"{getattr(self, name):.4g}"] for name in names]),
            (("channel", "shift", "variance ratio", "distance"), channels),
        ]


def shift(
    model: nn.Module,
    source: Iterable[Any],
    target: Iterable[Any],
    site: Query,
    *,
    call: int | None = None,
    pool: Pool = "mean",
    permutations: int = 999,
    max_samples: int = 2000,
    generator: torch.Generator | None = None,
    progress: TextIO | None = sys.stderr,
) -> Shift:
    """How far the data of `target` is from that of `source`, as the layer at `site` sees them; which channels say so.

    Args:
        source, target: Give batches, of any number: tensors, tuples whose last is a target, or mappings, which are
            keyword arguments.
        site: A query for one layer.
        call: Which of its calls, if the model calls it several times.
        pool: How an output becomes the features of a sample: ``"mean"`` takes the mean of each channel over all
            positions, ``"flatten"`` all values; or a function of the output, such as ``lambda x: x[:, 0]``.
        permutations: For the p-value, which is never less than 1 / (1 + permutations).
        max_samples: Of each data set, if it has more, as many are kept, drawn at random.
        generator: Draws them and the permutations; by itself the same every time.
        progress: Where to show it; only a terminal does.

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
    require_loader(source, "source")
    require_loader(target, "target")
    require_pool(pool)
    require_sites(model, site, "site")
    require_count(permutations, "permutations")
    require_count(max_samples, "max_samples")
    draw = torch.Generator().manual_seed(0) if generator is None else generator
    with Gathering(model, site, pool) as gathering:
        place, x = _features(gathering, source, "source", call, max_samples, draw, progress)
        _, y = _features(gathering, target, "target", call, max_samples, draw, progress)
    if x.shape[1] != y.shape[1]:
        raise ValueError(
            f"{place} has {x.shape[1]} features a sample of source and {y.shape[1]} of target; pass pool='mean', or a"
            " function that makes them alike"
        )
    return _compared(place, x, y, permutations, draw)


def _compared(place: Place, x: Tensor, y: Tensor, permutations: int, draw: torch.Generator) -> Shift:
    squared = distances.squared_distances(torch.cat([x, y]))
    width = distances.bandwidth(squared)
    if not width > 0:
        raise ValueError(f"{place} gives the same for every sample of source and target: there is nothing to compare")
    kernel = torch.exp(-squared / width)
    mmd, energy = distances.between(kernel, len(x)), distances.between(-squared.sqrt(), len(x))
    return Shift(
        site=place.path,
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
    """The channels, the one that differs most first."""
    (x_var, x_mean), (y_var, y_mean) = torch.var_mean(x, 0), torch.var_mean(y, 0)
    scale = ((x_var + y_var) / 2).sqrt()
    off = y_mean - x_mean
    apart = (off.square() + (y_var.sqrt() - x_var.sqrt()).square()).sqrt()
    # two constants that differ are infinitely far apart, and two that do not are the same
    columns = [_over(off, scale), _over(y_var, x_var, same=1.0), _over(apart, scale)]
    drifts = [Drift(k, *row) for k, row in enumerate(torch.stack(columns, 1).tolist())]
    return tuple(sorted(drifts, key=lambda drift: -drift.distance))


def _over(a: Tensor, b: Tensor, same: float = 0.0) -> Tensor:
    return torch.where((a == 0) & (b == 0), torch.full_like(a, same), a / b)


def _features(
    gathering: Gathering,
    loader: Iterable[Any],
    name: str,
    call: int | None,
    most: int,
    draw: torch.Generator,
    progress: TextIO | None,
) -> tuple[Place, Tensor]:
    """Where they are of, and the features of the samples of a loader: all, or so many drawn at random."""
    drawn: Drawn | None = None
    found: dict[Place, Tensor | str] = {}
    for batch in track(loader, batch_count(loader), name, progress):
        found.clear()
        gathering.run(batch, lambda place, rows: found.update({place: _kept(rows)}))
        place, rows = _chosen(found, call)
        drawn = drawn or Drawn(most, draw)
        drawn.add(place, rows)
    if drawn is None or drawn.rows is None or len(drawn.rows) < distances.FOLDS:
        raise ValueError(f"{name} gave {0 if drawn is None else drawn.seen} samples, and {distances.FOLDS} are needed")
    if not drawn.rows.isfinite().all():
        raise ValueError(
            f"{place} gave values that are not finite for {name}; torchhook.diagnose tells where they come from"
        )
    return place, drawn.rows


def _kept(rows: Tensor | str) -> Tensor | str:
    """Features that stay as they are, whatever the model does to its output next."""
    return rows if isinstance(rows, str) else rows.to(torch.float64, copy=True)


def _chosen(found: dict[Place, Tensor | str], call: int | None) -> tuple[Place, Tensor]:
    """The one layer and call that there are, or that was asked for."""
    paths = list(dict.fromkeys(place.path for place in found))
    if len(paths) > 1:
        raise ValueError(f"site must be one layer, and these answer to it: {', '.join(map(repr, paths[:5]))}")
    wanted = [place for place in found if call is None or place.call == call]
    if len(wanted) > 1:
        raise ValueError(f"{paths[0]!r} is called {len(wanted)} times in a pass: pass call=, from 0")
    if not wanted:
        said = "was not called" if call is None else f"has no call {call}"
        raise ValueError(f"site {said} in a batch; it was called {len(found)} times")
    rows = found[wanted[0]]
    if isinstance(rows, str):
        raise ValueError(f"{wanted[0]} cannot be compared: {rows}")
    return wanted[0], rows


class Drawn:
    """At most so many rows of all that come by, each with the same chance: those whose random numbers are least."""

    def __init__(self, most: int, draw: torch.Generator) -> None:
        self.most = most
        self.draw = draw
        self.seen = 0
        self.rows: Tensor | None = None
        self._chances = torch.zeros(0, dtype=torch.float64)

    def add(self, place: Place, rows: Tensor) -> None:
        """Take some of `rows`, perhaps in place of others."""
        if self.rows is not None and rows.shape[1] != self.rows.shape[1]:
            raise ValueError(
                f"{place} gave {self.rows.shape[1]} features a sample, and now {rows.shape[1]}; pool='mean' makes them"
                " as many as there are channels"
            )
        self.seen += len(rows)
        chances = torch.rand(len(rows), generator=self.draw, dtype=torch.float64)
        chances = torch.cat([self._chances, chances])
        rows = rows if self.rows is None else torch.cat([self.rows, rows])
        if len(rows) > self.most:
            least = chances.topk(self.most, largest=False, sorted=False).indices
            chances, rows = chances[least], rows[least.to(rows.device)]
        self._chances, self.rows = chances, rows
