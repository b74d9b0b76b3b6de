"""`models`, `inputs`, `datasets`: how far apart the values are that layers give, by how they are distributed.

One side is the reference and each other is held against it, layer by layer: the Wasserstein distance of the histograms
in deviations of the reference, and by channel the shift of the mean and the ratio of the variances. What is far is what
the rule of drift finds (`TH901`), by how much parts of the reference differ among themselves.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, batch_count, call, fitted, require_loader, samples_of
from torchhook.core.findings import Report
from torchhook.core.model_state import evaluating, state_kept
from torchhook.core.progress import track
from torchhook.core.selection import Query, queries_of, require_module, require_sites
from torchhook.core.text import html_table, table
from torchhook.core.trees import Arguments, leaves, mapped
from torchhook.rules.check import check
from torchhook.rules.history import History, joined, settled
from torchhook.rules.profile import LayerProfile, Profile, layer_profile
from torchhook.stats.measure import measure
from torchhook.stats.reading import Place, Reading, Snapshot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Sites = Query | Iterable[Query] | None

_PARTS = 4  # of the reference, which tell how far its samples are apart
_WINDOWS = 32  # of a data set; when there are more, two become one
_TOLD = 20  # rows in a table


class Layer(NamedTuple):
    """How far what a layer gives is from the reference.

    `distance` is in deviations of the reference, `noise` how far parts of that are apart, in the same unit. `shifts` of
    the means and `ratios` of the variances are by channel, the first in deviations; empty where channels differ, and
    NaN where a channel had one value.
    """

    path: str
    other: str
    distance: float
    noise: float
    shifts: Tensor
    ratios: Tensor

    @property
    def shift(self) -> float:
        """The shift of the channel that shifts most."""
        return float(self.shifts[self.shifts.abs().nan_to_num(-1).argmax()]) if len(self.shifts) else float("nan")

    @property
    def ratio(self) -> float:
        """The ratio of the variances that is furthest from 1."""
        return float(self.ratios[self.ratios.log().abs().nan_to_num(-1).argmax()]) if len(self.ratios) else float("nan")


@dataclass(frozen=True, eq=False, repr=False)
class Spreads:
    """How far others are from a reference, layer by layer.

    Args:
        reference, others: What was compared.
        rows: A layer of an other each, in execution order.
        report: What of it is far, as findings: those of `TH901`, and of values that are not finite.
        left_out: Layers that could not be compared, and why.
    """

    reference: str
    others: tuple[str, ...]
    rows: tuple[Layer, ...]
    report: Report
    left_out: Mapping[str, str] = field(default_factory=dict)

    def ranked(self) -> list[Layer]:
        """The layers that differ most first."""
        return sorted(self.rows, key=lambda row: -row.distance if row.distance == row.distance else float("-inf"))

    def table(self) -> list[dict[str, Any]]:
        """A plain dictionary a layer, for pandas and the like."""
        names = ("path", "other", "distance", "noise", "shift", "ratio")
        return [{name: getattr(row, name) for name in names} for row in self.rows]

    def figure(self, ax: Axes | None = None) -> Figure:
        """The distances, the first layer on top, a colour for each that is compared with the reference."""
        from torchhook.plot.style import BLUE, ORANGE, legend_above, name_layers, place, quiet, rows_page

        paths = list(dict.fromkeys(row.path for row in self.rows))
        figure, ax = place(ax, *rows_page(len(paths)))
        name_layers(ax, paths)
        high = 0.8 / len(self.others)
        for number, other in enumerate(self.others):
            some = [(paths.index(row.path) + (number + 0.5) * high - 0.4, row.distance) for row in self.rows_of(other)]
            colour = (BLUE, ORANGE)[number] if number < 2 else None
            ax.barh([y for y, _ in some], [x for _, x in some], height=high, color=colour, label=other)
        ax.set_xlabel(f"distance from {self.reference}, in deviations")
        quiet(ax)
        legend_above(ax)
        return figure

    def rows_of(self, other: str) -> list[Layer]:
        """The rows of one that was compared with the reference."""
        return [row for row in self.rows if row.other == other]

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(self._header(), self._cells())}{self._rest()}"

    def _repr_html_(self) -> str:
        title, rest = html.escape(self._title()), html.escape(self._rest())
        return f"<p>{title}</p>{html_table(self._header(), self._cells())}<p>{rest}</p>"

    def _title(self) -> str:
        return f"{', '.join(self.others)} against {self.reference}: {len(self.rows)} layers, the furthest first"

    def _rest(self) -> str:
        more = len(self.rows) - _TOLD
        return f"\n… and {more} more: .table() has all" if more > 0 else ""

    def _header(self) -> list[str]:
        several = ["of"] if len(self.others) > 1 else []
        return ["layer", *several, "distance", "noise", "mean shift", "variance ratio"]

    def _cells(self) -> list[list[str]]:
        return [
            [
                row.path or "''",
                *([row.other] if len(self.others) > 1 else []),
                f"{row.distance:.3g}",
                f"{row.noise:.2g}",
                f"{row.shift:+.3g}",
                f"{row.ratio:.3g}",
            ]
            for row in self.ranked()[:_TOLD]
        ]


def models(models: Mapping[str, nn.Module], x: Any, sites: Sites = None) -> Spreads:
    """How the layers of models differ on the same input: the first is the reference.

    Layers are compared by their paths. All models are in eval mode for the time, and `x` is moved and cast for each.

    Args:
        models: Two or more, by name.
        x: An input, a tuple of positional arguments or a dict of keyword arguments.
        sites: Queries for the layers; None means every leaf.

    >>> from torchhook.compare.distributions import models
    >>> first, second = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> _ = second.load_state_dict({**first.state_dict(), "0.bias": first[0].bias + 3})
    >>> result = models({"old": first, "new": second}, torch.randn(64, 4))
    >>> [(finding.site, finding.severity) for finding in result.report.findings]
    [('0', <Severity.ERROR: 'error'>)]
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError("models must be a mapping of names to models, two at least")
    for name, model in models.items():
        require_module(model, f"models[{name!r}]")
        require_sites(model, sites, "sites", f" (in models[{name!r}])")
    parts = list(_parts(x, "x"))
    sides = {name: _measured(model, parts, sites) for name, model in models.items()}
    return _compared(sides, type(next(iter(models.values()))).__name__, "x")


def inputs(model: nn.Module, x1: Any, x2: Any, sites: Sites = None) -> Spreads:
    """How what the layers of a model give differs between two inputs: `x1` is the reference.

    Args:
        x1, x2: An input each, a tuple of positional arguments or a dict of keyword arguments, of many samples; they
            need not be as many.
        sites: Queries for the layers; None means every leaf.

    >>> from torchhook.compare.distributions import inputs
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    >>> x = torch.randn(64, 4)
    >>> [finding.site for finding in inputs(model, x, x * 9).report.findings]
    ['0']
    >>> inputs(model, x, x.flip(0)).report.findings
    ()
    """
    require_module(model)
    require_sites(model, sites, "sites")
    parts = {name: list(_parts(x, name)) for name, x in (("x1", x1), ("x2", x2))}
    sides = {name: _measured(model, some, sites) for name, some in parts.items()}
    return _compared(sides, type(model).__name__, "x1")


def datasets(
    model: nn.Module,
    train_loader: Iterable[Any],
    test_loader: Iterable[Any],
    sites: Sites = None,
    *,
    progress: TextIO | None = sys.stderr,
) -> Spreads:
    """How what the layers of a model give differs between two data sets: the first is the reference.

    What is kept does not grow with the data sets.

    Args:
        train_loader, test_loader: Give batches, of any number: tensors, tuples whose last is a target, or mappings,
            which are keyword arguments.
        sites: Queries for the layers; None means every leaf.
        progress: Where to show it; only a terminal does.

    >>> from torchhook.compare.distributions import datasets
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    >>> data = torch.randn(200, 4)
    >>> result = datasets(model, data[:100].split(10), (data[100:] + 2).split(25))
    >>> [finding.site for finding in result.report.findings]
    ['0']
    """
    require_module(model)
    require_sites(model, sites, "sites")
    sides = {}
    for argument, loader in (("train_loader", train_loader), ("test_loader", test_loader)):
        require_loader(loader, argument)
        batches = track(loader, batch_count(loader), argument, progress)
        found = _measured(model, map(Batch.of, batches), sites)
        if not found:
            raise ValueError(f"{argument} gave no batch, or none that has a sample")
        sides[argument.removesuffix("_loader")] = found
    return _compared(sides, type(model).__name__, "train_loader")


class Window(NamedTuple):
    """What layers gave for some samples in a row."""

    samples: int
    snapshot: Snapshot


def _measured(model: nn.Module, batches: Iterable[Batch], sites: Sites) -> list[Snapshot]:
    """What layers give, for parts of the samples that are about as large, `_PARTS` if there are as many batches."""
    windows: list[Window] = []
    stats = measure(model, *queries_of(sites), stats=("moments", "histogram", "channels"), on_silent="ignore")
    least = count = 0  # samples of a window, and those since the last one
    with state_kept(model), evaluating(model), torch.no_grad(), stats:
        for batch in batches:
            call(model, Batch(fitted(batch.arguments, model), None))
            count += _samples(batch)
            if count > least:
                windows.append(Window(count, settled(stats.snapshot())))
                stats.reset()
                count = 0
            if len(windows) > _WINDOWS:
                windows = [_joined(windows[k : k + 2]) for k in range(0, len(windows), 2)]
                least = windows[0].samples - 1
        if count:
            windows.append(Window(count, settled(stats.snapshot())))
    return [_joined(part).snapshot for part in _quarters(windows)]


def _quarters(windows: list[Window]) -> list[list[Window]]:
    """Windows in parts of about as many samples; what is less than half a part is joined with its neighbour."""
    total, seen = sum(window.samples for window in windows), 0
    parts: dict[int, list[Window]] = {}
    for window in windows:
        parts.setdefault(int(_PARTS * (seen + window.samples / 2) / total), []).append(window)
        seen += window.samples
    found: list[list[Window]] = []
    for part in parts.values():
        if found and 2 * _PARTS * min(sum(window.samples for window in some) for some in (part, found[-1])) < total:
            found[-1] += part
        else:
            found.append(part)
    return found


def _samples(batch: Batch) -> int:
    return samples_of(batch).length if any(leaf.dim() for _, leaf in leaves(batch.arguments)) else 1


def _joined(windows: list[Window]) -> Window:
    """Windows as one, now and not when it is read, so that they need not be kept."""
    whole = settled(joined(window.snapshot for window in windows))
    for place in whole:
        whole[place].states()
    return Window(sum(window.samples for window in windows), whole)


def _compared(sides: dict[str, list[Snapshot]], model: str, argument: str) -> Spreads:
    (reference, windows), *others = sides.items()
    whole = settled(joined(windows))
    known = {place: layer_profile(whole[place], place, windows) for place in whole if place[1].startswith("output")}
    rows: list[Layer] = []
    silent: dict[str, dict[str, None]] = {}  # where a layer did not run
    reports = []
    for name, found in others:
        live = settled(joined(found))
        common = {place: side for place, side in known.items() if place in live.rows}
        for place in {**known, **live.rows}:
            if place[1].startswith("output") and place not in common:
                silent.setdefault(_label(place), {})[name if place in known else reference] = None
        rows += [_layer(place, name, side, whole[place], live[place]) for place, side in common.items()]
        reports.append(_report(Profile(common, model), found, name if len(others) > 1 else ""))
    if not rows:
        raise ValueError(f"no layer has the same path in {reference} and {', '.join(name for name, _ in others)}")
    notes = [f"{argument} is one piece: how far its samples are apart is not known"] if len(windows) < 2 else []
    if single := sum(bool(row.shifts.isnan().any()) for row in rows):
        notes.append(f"{single} of {len(rows)} layers gave a channel less than two values: its shift and ratio are NaN")
    findings = tuple(finding for report in reports for finding in report.findings)
    report = replace(reports[0], findings=findings, notes=tuple(notes))
    left_out = {label: f"it did not run in {', '.join(where)}" for label, where in silent.items()}
    return Spreads(reference, tuple(name for name, _ in others), tuple(rows), report, left_out)


def _report(profile: Profile, windows: list[Snapshot], name: str) -> Report:
    """What the rules say; with the name of what they say it of, if there are several."""
    history = History(profile=profile)
    for number, window in enumerate(windows):
        history.add(number, window)
    report = check(history, ["TH101", "TH901"], model=profile.model)
    if not name:
        return report
    return replace(report, findings=tuple(replace(one, message=f"{name}: {one.message}") for one in report.findings))


def _layer(place: Place, name: str, known: LayerProfile, reference: Reading, live: Reading) -> Layer:
    return Layer(_label(place), name, known.distance(live), known.noise, *_by_channel(reference, live, known.unit))


def _by_channel(reference: Reading, live: Reading, unit: float) -> tuple[Tensor, Tensor]:
    """The shifts of the means and the ratios of the variances; empty where there are not the same channels."""
    none = torch.empty(0, dtype=torch.float64)
    if "channels" not in reference or "channels" not in live:
        return none, none
    a, b = reference.channels, live.channels
    if a.mean.shape != b.mean.shape:
        return none, none
    least = (1e-3 * unit) ** 2  # beside the layer, such a channel gives one value all the time
    before, after = (side.std.square() + least for side in (a, b))
    return (b.mean - a.mean) / ((before + after) / 2).sqrt(), after / before


def _parts(x: Any, argument: str) -> Iterator[Batch]:
    """An input in some parts of its samples."""
    given = Arguments.of(x)
    found = [leaf for _, leaf in leaves(given)]
    if not found:
        raise TypeError(f"{argument} must be an input, a tuple of arguments or a dict of keywords, not {x!r:.80}")
    sizes = {len(leaf) if leaf.dim() else None for leaf in found}
    if sizes == {0}:
        raise ValueError(f"{argument} has no sample: its first dimension is 0")
    count = (sizes.pop() or 0) if len(sizes) == 1 else 0
    step = max(1, -(-count // _PARTS))
    cuts: list[Callable[[Tensor], Tensor]] = [_cut(k, k + step) for k in range(0, count, step)]
    for cut in cuts or [lambda tensor: tensor]:
        yield Batch(mapped(cut, given), None)


def _cut(first: int, last: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[first:last]


def _label(place: Place) -> str:
    path, port = place
    return path + port.removeprefix("output")
