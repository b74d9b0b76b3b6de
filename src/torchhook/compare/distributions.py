"""`models`, `inputs`, `datasets`: how far apart the distributions of layer outputs are.

One side is the reference, and every other is compared with it layer by layer: the Wasserstein distance of the
histograms in standard deviations of the reference, and for each channel the shift of the mean and the ratio of the
variances. The drift rule (`TH901`) decides what is far, judging by how much parts of the reference differ.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, InputBatches, ToInputs, batch_count, call, fitted, samples_of
from torchhook.core.findings import Report
from torchhook.core.model_state import evaluating, state_kept
from torchhook.core.progress import Progress, track
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

_PARTS = 4  # of the reference, which show how much its samples vary
_WINDOWS = 32  # of a data set; if there are more, neighbours are merged
_SHOWN = 20  # rows in a table


class Layer(NamedTuple):
    """How far the output of a layer is from the reference.

    `distance` is in standard deviations of the reference, and `noise` is how far parts of the reference are apart, in
    the same unit. `shifts` of the means (in standard deviations) and `ratios` of the variances are per channel: empty
    if the number of channels differs, and NaN for a channel with a single value.
    """

    path: str
    other: str
    distance: float
    noise: float
    shifts: Tensor
    ratios: Tensor

    @property
    def shift(self) -> float:
        """The largest shift of a channel."""
        return float(self.shifts[self.shifts.abs().nan_to_num(-1).argmax()]) if len(self.shifts) else float("nan")

    @property
    def ratio(self) -> float:
        """The ratio of variances that is furthest from 1."""
        return float(self.ratios[self.ratios.log().abs().nan_to_num(-1).argmax()]) if len(self.ratios) else float("nan")


@dataclass(frozen=True, eq=False, repr=False)
class Spreads:
    """How far others are from a reference, layer by layer.

    Args:
        reference, others: The names of what was compared.
        rows: One row per layer and other, in execution order.
        report: Findings on layers that are far from the reference (`TH901`) or have non-finite values.
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
        """One plain dictionary per row, for pandas and similar tools."""
        names = ("path", "other", "distance", "noise", "shift", "ratio")
        return [{name: getattr(row, name) for name in names} for row in self.rows]

    def figure(self, ax: Axes | None = None) -> Figure:
        """The distances as bars, the first layer on top, one colour per other."""
        from torchhook.plot.style import legend_above, name_layers, place, quiet, rows_page
        from torchhook.render.palette import BLUE, ORANGE

        paths = list(dict.fromkeys(row.path for row in self.rows))
        figure, ax = place(ax, *rows_page(len(paths)))
        name_layers(ax, paths)
        high = 0.8 / len(self.others)
        for number, other in enumerate(self.others):
            some = [(paths.index(row.path) + (number + 0.5) * high - 0.4, row.distance) for row in self.rows_of(other)]
            colour = (BLUE, ORANGE)[number] if number < 2 else None
            ax.barh([y for y, _ in some], [x for _, x in some], height=high, color=colour, label=other)
        ax.set_xlabel(f"distance from {self.reference} (standard deviations)")
        quiet(ax)
        legend_above(ax)
        return figure

    def rows_of(self, other: str) -> list[Layer]:
        """The rows of one of the others."""
        return [row for row in self.rows if row.other == other]

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(self._header(), self._cells())}{self._rest()}"

    def _repr_html_(self) -> str:
        title, rest = html.escape(self._title()), html.escape(self._rest())
        return f"<p>{title}</p>{html_table(self._header(), self._cells())}<p>{rest}</p>"

    def _title(self) -> str:
        return f"{', '.join(self.others)} against {self.reference}: {len(self.rows)} layers, the furthest first"

    def _rest(self) -> str:
        more = len(self.rows) - _SHOWN
        return f"\n… and {more} more: see .table()" if more > 0 else ""

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
            for row in self.ranked()[:_SHOWN]
        ]


def models(models: Mapping[str, nn.Module], x: Any, sites: Sites = None) -> Spreads:
    """How the layer outputs of several models differ on the same input: the first model is the reference.

    Layers are matched by path. All models run in eval mode, and `x` is moved and cast for each.

    Args:
        models: Two or more models, by name.
        x: An input, a tuple of positional arguments, or a dict of keyword arguments.
        sites: Queries for the layers; None means every leaf module.

    >>> from torchhook.compare.distributions import models
    >>> first, second = nn.Sequential(nn.Linear(4, 8), nn.ReLU()), nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> _ = second.load_state_dict({**first.state_dict(), "0.bias": first[0].bias + 3})
    >>> result = models({"old": first, "new": second}, torch.randn(64, 4))
    >>> [(finding.site, finding.severity) for finding in result.report.findings]
    [('0', <Severity.ERROR: 'error'>)]
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError("models must be a mapping of names to at least two models")
    for name, model in models.items():
        require_module(model, f"models[{name!r}]")
        require_sites(model, sites, "sites", f" (in models[{name!r}])")
    parts = list(_parts(x, "x"))
    sides = {name: _measured(model, parts, sites) for name, model in models.items()}
    return _compared(sides, type(next(iter(models.values()))).__name__, "x")


def inputs(model: nn.Module, x1: Any, x2: Any, sites: Sites = None) -> Spreads:
    """How the layer outputs of a model differ between two inputs: `x1` is the reference.

    Args:
        x1, x2: Inputs, tuples of positional arguments, or dicts of keyword arguments. Each should have many samples;
            the numbers may differ.
        sites: Queries for the layers; None means every leaf module.

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
    train_loader: Any,
    test_loader: Any,
    sites: Sites = None,
    *,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Spreads:
    """How the layer outputs of a model differ between two data sets: the first is the reference.

    Memory does not grow with the data sets.

    Args:
        train_loader, test_loader: Yield batches: tensors, tuples whose last element is a target, or mappings of keyword
            arguments.
        sites: Queries for the layers; None means every leaf module.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

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
    for argument, data in (("train_loader", train_loader), ("test_loader", test_loader)):
        loader = InputBatches(data, model, batch_to_inputs, argument)
        batches = track(loader, batch_count(loader), argument, progress)
        found = _measured(model, map(Batch.of, batches), sites)
        if not found:
            raise ValueError(f"{argument} has no samples")
        sides[argument.removesuffix("_loader")] = found
    return _compared(sides, type(model).__name__, "train_loader")


class SampleWindow(NamedTuple):
    """The statistics of layer outputs over some consecutive samples."""

    samples: int
    snapshot: Snapshot


def _measured(model: nn.Module, batches: Iterable[Batch], sites: Sites) -> list[Snapshot]:
    """The statistics of layer outputs for `_PARTS` parts of the samples of about equal size, or fewer."""
    windows: list[SampleWindow] = []
    stats = measure(model, *queries_of(sites), stats=("moments", "histogram", "channels"), on_silent="ignore")
    least = count = 0  # size above which a window is complete, and samples since the last one
    with state_kept(model), evaluating(model), torch.no_grad(), stats:
        for batch in batches:
            call(model, Batch(fitted(batch.arguments, model), None))
            count += _samples(batch)
            if count > least:
                windows.append(SampleWindow(count, settled(stats.snapshot())))
                stats.reset()
                count = 0
            if len(windows) > _WINDOWS:
                windows = [_joined(windows[k : k + 2]) for k in range(0, len(windows), 2)]
                least = windows[0].samples - 1
        if count:
            windows.append(SampleWindow(count, settled(stats.snapshot())))
    return [_joined(part).snapshot for part in _quarters(windows)]


def _quarters(windows: list[SampleWindow]) -> list[list[SampleWindow]]:
    """The windows in parts of about equal size; less than half a part is merged with its neighbour."""
    total, seen = sum(window.samples for window in windows), 0
    parts: dict[int, list[SampleWindow]] = {}
    for window in windows:
        parts.setdefault(int(_PARTS * (seen + window.samples / 2) / total), []).append(window)
        seen += window.samples
    found: list[list[SampleWindow]] = []
    for part in parts.values():
        if found and 2 * _PARTS * min(sum(window.samples for window in some) for some in (part, found[-1])) < total:
            found[-1] += part
        else:
            found.append(part)
    return found


def _samples(batch: Batch) -> int:
    return samples_of(batch).length if any(leaf.dim() for _, leaf in leaves(batch.arguments)) else 1


def _joined(windows: list[SampleWindow]) -> SampleWindow:
    """One window for several, merged now and not lazily, so that the originals can be freed."""
    whole = settled(joined(window.snapshot for window in windows))
    for place in whole:
        whole[place].states()
    return SampleWindow(sum(window.samples for window in windows), whole)


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
    notes = (
        [f"{argument} could not be split into parts: how much its samples vary is unknown"] if len(windows) < 2 else []
    )
    if single := sum(bool(row.shifts.isnan().any()) for row in rows):
        notes.append(
            f"{single} of {len(rows)} layers have a channel with fewer than two values: its shift and ratio are NaN"
        )
    findings = tuple(finding for report in reports for finding in report.findings)
    report = replace(reports[0], findings=findings, notes=tuple(notes))
    left_out = {label: f"it did not run in {', '.join(where)}" for label, where in silent.items()}
    return Spreads(reference, tuple(name for name, _ in others), tuple(rows), report, left_out)


def _report(profile: Profile, windows: list[Snapshot], name: str) -> Report:
    """The findings of the rules, each preceded by `name` if that is not empty."""
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
    """The shifts of the means and the ratios of the variances; empty if the channels differ."""
    none = torch.empty(0, dtype=torch.float64)
    if "channels" not in reference or "channels" not in live:
        return none, none
    a, b = reference.channels, live.channels
    if a.mean.shape != b.mean.shape:
        return none, none
    least = (1e-3 * unit) ** 2  # compared with the layer, such a channel is constant
    before, after = (side.std.square() + least for side in (a, b))
    return (b.mean - a.mean) / ((before + after) / 2).sqrt(), after / before


def _parts(x: Any, argument: str) -> Iterator[Batch]:
    """An input split into parts of its samples."""
    given = Arguments.of(x)
    found = [leaf for _, leaf in leaves(given)]
    if not found:
        raise TypeError(
            f"{argument} must be an input, a tuple of arguments, or a dict of keyword arguments, not {x!r:.80}"
        )
    sizes = {len(leaf) if leaf.dim() else None for leaf in found}
    if sizes == {0}:
        raise ValueError(f"{argument} has no samples: its first dimension is 0")
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
