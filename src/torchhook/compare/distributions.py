"""`models`, `inputs`, `datasets`: how far apart the distributions of layer outputs are.

One side is the reference, and every other is compared with it layer by layer: the Wasserstein distance of the
histograms in standard deviations of the reference, and for each channel the shift of the mean and the ratio of the
variances. The drift rule (`TH901`) decides what is far, judging by how much parts of the reference differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from torchhook.compare.layer_pairs import Pair
from torchhook.compare.matched import Matched, has_same_channels, label_of
from torchhook.compare.worst import Worst
from torchhook.core.batch import Batch, InputBatches, ToInputs, batch_count, call, fitted, inputs_of, samples_of
from torchhook.core.findings import Finding, Report
from torchhook.core.model_state import evaluating, state_kept
from torchhook.core.parts import Bars, Part
from torchhook.core.progress import Progress, track
from torchhook.core.result import Result
from torchhook.core.selection import Query, queries_of, require_module, require_sites
from torchhook.core.tap import require_count
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

_NAMED = 20  # others in a title
_PARTS = 4  # of the reference, which show how much its samples vary
_WINDOWS = 32  # of a data set; if there are more, neighbours are merged


class Layer(NamedTuple):
    """How far the output of a layer is from the reference.

    `distance` is in standard deviations of the reference, and `noise` is how far parts of the reference are apart, in
    the same unit. `shifts` of the means (in standard deviations) and `ratios` of the variances are per channel, and NaN
    for a channel with a single value; if the channels do not correspond, there is one number for all values together.
    `paired` is the layer of the other model, found `by` its ``"path"`` or by its ``"role"`` and order.
    """

    path: str
    other: str
    distance: float
    noise: float
    shifts: Tensor
    ratios: Tensor
    paired: str
    by: str = "path"

    @property
    def shift(self) -> float:
        """The largest shift of a channel."""
        return float(self.shifts[self.shifts.abs().nan_to_num(-1).argmax()]) if len(self.shifts) else float("nan")

    @property
    def ratio(self) -> float:
        """The ratio of variances that is furthest from 1."""
        return float(self.ratios[self.ratios.log().abs().nan_to_num(-1).argmax()]) if len(self.ratios) else float("nan")

    def __repr__(self) -> str:
        name = self.path or "the model"
        with_ = f", {self.paired}" if self.by == "role" else ""
        return f"{name} ({self.other}{with_}): distance {self.distance:.3g}, noise {self.noise:.2g}"


@dataclass(frozen=True, eq=False, repr=False)
class Spreads(Result):
    """How far others are from a reference, layer by layer.

    Args:
        reference, others: The names of what was compared.
        rows: One row per layer and other, in execution order.
        report: Findings on layers that are far from the reference (`TH901`) or have non-finite values.
        left_out: Layers that could not be compared, and why.
        compared: The models of the others, by name, held weakly: the result does not keep them alive.
    """

    reference: str
    others: tuple[str, ...]
    rows: tuple[Layer, ...]
    report: Report
    left_out: Mapping[str, str] = field(default_factory=dict)
    compared: Mapping[str, weakref.ref[nn.Module]] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compared": {}}  # weak references cannot be copied or pickled

    @property
    def pairs(self) -> dict[str, dict[str, str]]:
        """Which layers were compared: for each of the others, its layer by that of the reference."""
        return {other: {row.path: row.paired for row in self.rows_of(other)} for other in self.others}

    def worst(self, k: int) -> Worst:
        """The `k` layers with parameters that differ most, and their parameters, to fine-tune them.

        ``ranked()[:k]`` also has layers without parameters. Layers are those of the model that was compared, and for
        `compare.models` those of the others.

        >>> from torchhook.compare import datasets
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> result = datasets(model, torch.randn(99, 4).split(33), (torch.randn(99, 4) + 9).split(33))
        >>> worst = result.worst(2)
        >>> sorted(worst.paths), worst.names[0] in ("0.weight", "2.weight")
        (['0', '2'], True)
        >>> optimizer = torch.optim.SGD(worst.parameters(), lr=0.01)
        """
        require_count(k, "k")
        return Worst.of(self.ranked(), self.compared, k)

    def ranked(self) -> list[Layer]:
        """The layers that differ most first."""
        return sorted(self.rows, key=lambda row: -row.distance if row.distance == row.distance else float("-inf"))

    def _records(self) -> list[dict[str, Any]]:
        names = ("path", "other", "paired", "by", "distance", "noise", "shift", "ratio")
        return [{name: getattr(row, name) for name in names} for row in self.rows]

    def _figures(self) -> list[Part]:
        paths = list(dict.fromkeys(row.path for row in self.rows))
        by_other = {other: {row.path: row.distance for row in self.rows_of(other)} for other in self.others}
        lines = {other: [found.get(path) for path in paths] for other, found in by_other.items()}
        unit = f"distance from {self.reference} (standard deviations)"
        return [Bars(paths, lines, unit, "Distances"), *([self.report] if self.report.findings else [])]

    def figure(self, ax: Axes | None = None) -> Figure:
        """The distances as bars, the first layer on top, one colour per other."""
        from torchhook.plot.style import legend_above, name_layers, place, quiet, rows_page
        from torchhook.render.palette import LINES

        paths = list(dict.fromkeys(row.path for row in self.rows))
        figure, ax = place(ax, *rows_page(len(paths)))
        name_layers(ax, paths)
        high = 0.8 / len(self.others)
        for number, other in enumerate(self.others):
            some = [(paths.index(row.path) + (number + 0.5) * high - 0.4, row.distance) for row in self.rows_of(other)]
            colour = LINES[number % len(LINES)]
            ax.barh([y for y, _ in some], [x for _, x in some], height=high, color=colour, label=other)
        ax.set_xlabel(f"distance from {self.reference} (standard deviations)")
        quiet(ax)
        legend_above(ax)
        return figure

    def rows_of(self, other: str) -> list[Layer]:
        """The rows of one of the others."""
        return [row for row in self.rows if row.other == other]

    def _title(self) -> str:
        names = ", ".join(self.others[:_NAMED]) + (", …" if len(self.others) > _NAMED else "")
        return f"{names} against {self.reference}: {len(self.rows)} layers, the furthest first"

    def _foot(self) -> Sequence[str]:
        return [f"{len(self.left_out)} layers were left out: see .left_out"] if self.left_out else []

    @property
    def _has_roles(self) -> bool:
        return any(row.by == "role" for row in self.rows)

    def _printed(self) -> tuple[Sequence[str], list[list[str]]]:
        several = ["of"] if len(self.others) > 1 else []
        paired = ["paired with"] if self._has_roles else []
        return ["layer", *several, *paired, "distance", "noise", "mean shift", "variance ratio"], [
            [
                row.path or "''",
                *([row.other] if len(self.others) > 1 else []),
                *([row.paired or "''"] if self._has_roles else []),
                f"{row.distance:.3g}",
                f"{row.noise:.2g}",
                f"{row.shift:+.3g}",
                f"{row.ratio:.3g}",
            ]
            for row in self.ranked()
        ]


def models(models: Mapping[str, nn.Module], x: Any, sites: Sites = None) -> Spreads:
    """How the layer outputs of several models differ on the same input: the first model is the reference.

    Layers are paired by path. Where the paths of two models differ, as those of different architectures do, they are
    paired by role (convolution, norm, activation, linear, attention, …) and order, and ``result.pairs`` has the pairs.
    Findings are on layers with the same path, and on two models that have the same layers under other names:
    different architectures are meant to differ. All models run in eval mode, and `x` is moved and cast for each.

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
    >>> deeper = nn.ModuleDict({"fc": nn.Linear(4, 8), "act": nn.GELU(), "out": nn.Linear(8, 2)})
    >>> deeper.forward = lambda x: deeper["out"](deeper["act"](deeper["fc"](x)))
    >>> models({"old": first, "deeper": deeper}, torch.randn(64, 4)).pairs
    {'deeper': {'0': 'fc', '1': 'act'}}
    """
    if not isinstance(models, Mapping) or len(models) < 2:
        raise ValueError("models must be a mapping of names to at least two models")
    for name, model in models.items():
        require_module(model, f"models[{name!r}]")
        require_sites(model, sites, "sites", f" (in models[{name!r}])")
    parts = list(_parts(inputs_of(x, next(iter(models.values()))), "x"))
    sides = {name: _measured(model, parts, sites) for name, model in models.items()}
    return _compared(sides, models, "x")


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
    parts = {name: list(_parts(inputs_of(x, model), name)) for name, x in (("x1", x1), ("x2", x2))}
    sides = {name: _measured(model, some, sites) for name, some in parts.items()}
    return _compared(sides, dict.fromkeys(sides, model), "x1")


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
    return _compared(sides, dict.fromkeys(sides, model), "train_loader")


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


def _compared(sides: dict[str, list[Snapshot]], models: Mapping[str, nn.Module], argument: str) -> Spreads:
    (reference, windows), *others = sides.items()
    whole = settled(joined(windows))
    known = {place: layer_profile(whole[place], place, windows) for place in whole if place[1].startswith("output")}
    rows: list[Layer] = []
    left_out: dict[tuple[str, str], list[str]] = {}  # where a layer has no counterpart
    reports, notes = [], list[str]()
    for name, found in others:
        matched = Matched.of(known, whole, found, (models[reference], models[name]))
        for label, why, side in matched.left_out((reference, name)):
            left_out.setdefault((label, why), []).append(side)
        rows += [_layer(place, name, known[place], whole[place], matched) for place in matched.places]
        reports.append(_report(matched, known, type(models[reference]).__name__, name if len(others) > 1 else ""))
        if unjudged := len(matched.places) - len(matched.judged):
            notes.append(f"{unjudged} layers of {name} were paired by role: their distances are not judged")
    if not rows:
        names = ", ".join(name for name, _ in others)
        raise ValueError(f"no layer of {reference} has a counterpart in {names}, neither by path nor by role")
    if len(windows) < 2:
        notes.append(f"{argument} could not be split into parts: how much its samples vary is unknown")
    if single := sum(bool(row.shifts.isnan().any()) for row in rows):
        notes.append(
            f"{single} of {len(rows)} layers have a channel with fewer than two values: its shift and ratio are NaN"
        )
    findings = tuple(finding for report in reports for finding in report.findings)
    return Spreads(
        reference,
        tuple(name for name, _ in others),
        tuple(rows),
        replace(reports[0], findings=findings, notes=tuple(notes)),
        {label: f"{why} {', '.join(dict.fromkeys(where))}" for (label, why), where in left_out.items()},
        {name: weakref.ref(models[name]) for name, _ in others},
    )


def _report(matched: Matched, known: Mapping[Place, LayerProfile], model: str, name: str) -> Report:
    """The findings of the rules, each preceded by `name` if that is not empty."""
    history = History(profile=Profile({place: known[place] for place in known if place in matched.judged}, model))
    for number, window in enumerate(matched.windows):
        history.add(number, window)
    report = check(history, ["TH101", "TH901"], model=model)
    return replace(report, findings=tuple(_named(finding, matched.pairs, name) for finding in report.findings))


def _named(finding: Finding, pairs: Mapping[str, Pair], name: str) -> Finding:
    """A finding that says in which of several models it is, and in which layer, if that has another path."""
    pair = pairs.get(finding.site)
    where = [name] if name else []
    where += [f"in {pair.paired}"] if pair is not None and pair.paired != pair.path else []
    return replace(finding, message=f"{', '.join(where)}: {finding.message}") if where else finding


def _layer(place: Place, name: str, known: LayerProfile, reference: Reading, matched: Matched) -> Layer:
    live, pair = matched.whole[place], matched.pairs[place[0]]
    comparable = place in matched.judged and has_same_channels(reference, live)
    numbers = (_by_channel if comparable else _as_a_whole)(reference, live, known.unit)
    paired = pair.paired + matched.places[place][1].removeprefix("output")
    return Layer(label_of(place), name, known.distance(live), known.noise, *numbers, paired, pair.by)


def _by_channel(reference: Reading, live: Reading, unit: float) -> tuple[Tensor, Tensor]:
    """The shifts of the means and the ratios of the variances of all channels."""
    a, b = reference.channels, live.channels
    return _shifts(a.mean, a.std, b.mean, b.std, unit)


def _as_a_whole(reference: Reading, live: Reading, unit: float) -> tuple[Tensor, Tensor]:
    """The shift of the mean and the ratio of the variances of all values together."""
    mean, std, other_mean, other_std = torch.tensor(
        [[reference.mean], [reference.std], [live.mean], [live.std]], dtype=torch.float64
    )
    return _shifts(mean, std, other_mean, other_std, unit)


def _shifts(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor, unit: float) -> tuple[Tensor, Tensor]:
    least = (1e-3 * unit) ** 2  # compared with the layer, such a channel is constant
    before, after = std.square() + least, other_std.square() + least
    return (other_mean - mean) / ((before + after) / 2).sqrt(), after / before


def _parts(given: Arguments, argument: str) -> Iterator[Batch]:
    """An input split into parts of its samples."""
    found = [leaf for _, leaf in leaves(given)]
    if not found:
        raise TypeError(
            f"{argument} must be an input, a tuple of arguments, or a dict of keyword arguments, not {given!r:.80}"
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
