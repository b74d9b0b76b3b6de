"""Sweeps: edit one site after the other, or one position of a site after the other, and measure how a metric of the
output changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from torchhook.core.batch import inputs_of
from torchhook.core.edit import Edit
from torchhook.core.errors import SelectionError
from torchhook.core.parts import Bars, Matrix, Part, Table
from torchhook.core.progress import Progress, track
from torchhook.core.result import Result
from torchhook.core.selection import Query, queries_of, require_module, select
from torchhook.core.session import Session
from torchhook.core.site import PORTS, Port, Site
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import warn
from torchhook.core.trees import Arguments, leaves, mapped
from torchhook.edits import apply, patch
from torchhook.edits.ablation import PROJECTIONS
from torchhook.edits.clean_run import CleanRun
from torchhook.edits.wrapped import Lengths, MixedSamplesError, PositionEdit, ShareEdit, is_batched

_SAMPLES = 64  # in one forward, unless `batch` is given


class SweepRow(NamedTuple):
    """How the edit of one site, or of one position of it, changes the metric."""

    site: Site
    value: float
    change: float  # from the run without an edit
    recovered: float | None  # with a source, the fraction of the way from there to the clean run
    position: int | None = None  # None: the whole value was edited
    module: str = ""  # its class

    @property
    def place(self) -> str:
        """The path of the module and its class, as in ``3 (ReLU)``."""
        return f"{self.site.path or 'the model'}{f' ({self.module})' if self.module else ''}"


class Sweep(Result, Sequence[SweepRow]):
    """The rows of a sweep in the order of the sites, and the metric without an edit and of the clean run."""

    def __init__(self, rows: list[SweepRow], baseline: float, clean: float | None) -> None:
        self.rows = rows
        self.baseline = baseline
        self.clean = clean

    def best(self, count: int = 5) -> list[SweepRow]:
        """The rows that change the metric most."""
        return sorted(self.rows, key=lambda row: -abs(row.change))[:count]

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def _records(self) -> list[dict[str, Any]]:
        left_out = () if self._has_positions() else ("position",)
        records = (
            {"path": row.site.path, "module": row.module, "port": row.site.port, **row._asdict()} for row in self.rows
        )
        return [{key: value for key, value in record.items() if key not in left_out} for record in records]

    def _tables(self) -> list[Table]:
        rows = [{name: value for name, value in row.items() if name != "site"} for row in self._records()]
        return [Table.of(rows)]

    def _figures(self) -> list[Part]:
        effects = [row.change if row.recovered is None else row.recovered for row in self.rows]
        unit = "change of the metric" if self.clean is None else "recovered share of the metric"
        names = {row.site: f"{row.place}, {row.site.port}" for row in self.rows}
        if not self._has_positions():
            return [Bars([names[row.site] for row in self.rows], {"": effects}, unit, "Effect")]
        sites = {site: number for number, site in enumerate(names)}
        wide = 1 + max(row.position or 0 for row in self.rows)
        values = torch.full((len(sites), wide), torch.nan)
        for row, effect in zip(self.rows, effects, strict=True):
            values[sites[row.site], row.position or 0] = effect if math.isfinite(effect) else torch.inf
        return [Matrix(values, list(names.values()), list(map(str, range(wide))), unit, "Effect by position")]

    def _title(self) -> str:
        clean = "" if self.clean is None else f", clean run {self.clean:.4g}"
        count = len(dict.fromkeys(row.site for row in self.rows))
        over = f"{count} site{'' if count == 1 else 's'}"
        if self._has_positions():
            over += f" × {len({row.position for row in self.rows})} positions"
        return f"Sweep over {over}: without an edit {self.baseline:.4g}{clean}"

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        has_positions = self._has_positions()
        place = ("site", "module", "port", *(("position",) if has_positions else ()))
        header = (*place, "value", "change", *(() if self.clean is None else ("recovered",)))
        rows = []
        for row in self.rows:
            cells = [row.site.path or "''", row.module, row.site.port, *([row.position] if has_positions else [])]
            cells += [f"{row.value:.4g}", f"{row.change:+.4g}"]
            rows.append(cells if row.recovered is None else [*cells, f"{row.recovered:.1%}"])
        return header, rows

    def _important(self) -> int:
        return self.rows.index(self.best(1)[0]) if self._has_positions() else 0

    def _has_positions(self) -> bool:
        return any(row.position is not None for row in self.rows)


def sweep(
    model: nn.Module,
    x: Any,
    sites: Query | Iterable[Any],
    edit: Edit | Callable[[Any], Any] | None,
    metric: Callable[[Any], Any],
    source: Any = None,
    *,
    port: Port = "output",
    positions: bool = False,
    batch: int | None = None,
    progress: Progress = True,
) -> Sweep:
    """Edit each of `sites` in turn, run `model` on `x`, and compute `metric` of the output.

    With `source`, the clean input, each site is patched from the clean run into the run on `x`: activation
    patching. Then `edit` is None, or makes an edit from the clean values: ``lambda clean: edits.patch(clean, ...)``.

    Args:
        x, source: An input, a tuple of positional arguments or a dict of keyword arguments.
        sites: A query, or several; or `Site` objects, or pairs of path and port.
        metric: A function from the model's output to a number.
        positions: Edit each position (token) of each site alone, where values are samples × positions × features; the
            effects of the positions need not add up to that of all of them. `plot.sweep` draws site × position.
        batch: How many sites share a forward, each with its own copy of `x` along the first dimension. By default
            as many as make 64 samples, if the model is in eval mode and treats samples independently (this is
            checked); 1 runs each site alone.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> from torchhook import edits, sweep
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU()).eval()
    >>> sweep(model, torch.ones(1, 2), ["0", "1"], edits.scale(3.0), torch.sum)
    Sweep over 2 sites: without an edit 2
    site  module    port    value  change
    0     Identity  output  6      +4
    1     ReLU      output  6      +4
    """
    require_module(model)
    if batch is not None:
        require_count(batch, "batch")
    if not isinstance(positions, bool):
        raise TypeError(f"positions must be True or False, not {positions!r:.80}: each is edited in turn")
    chosen = _sites(model, sites, port)
    given, clean_value = inputs_of(x, model), None
    if model.training:
        warn("the model is in training mode, so dropout and batch statistics change the metric as well; call .eval()")
    change = edit
    with torch.no_grad():
        output = model(*given.args, **given.kwargs)
        baseline = _number(metric(output))
        if source is not None:
            clean, clean_value = _clean(model, chosen, inputs_of(source, model), metric)
            change = patch(clean) if edit is None else _made_from(edit, clean)
        if change is None:
            raise ValueError("edit is None, which means patching from source=, but source is None")
        made = change if isinstance(change, Edit) else apply(change)
        cells = _by_position(model, given, chosen, made) if positions else [_Cell(site, made) for site in chosen]
        runner = _Runner(model, given, metric, output, batch)
        values = list(track(runner.over(cells), len(cells), "sweep", progress))
    classes = {site: type(model.get_submodule(site.path)).__name__ for site in chosen}
    rows = [
        SweepRow(
            cell.site,
            value,
            value - baseline,
            _recovered(value, baseline, clean_value),
            cell.position,
            classes[cell.site],
        )
        for cell, value in zip(cells, values, strict=True)
    ]
    return Sweep(rows, baseline, clean_value)


class _Cell(NamedTuple):
    """One run of a sweep: an edit of a site, or of one position of it."""

    site: Site
    edit: Edit
    position: int | None = None


def _by_position(model: nn.Module, given: Arguments, sites: list[Site], edit: Edit) -> list[_Cell]:
    """A cell for each position of each site, whose number a run shows."""
    found: dict[Site, int] = {}
    with Session(model, [Tap(site.path, Lengths(edit, found, site), site.port) for site in sites]):
        model(*given.args, **given.kwargs)
    return [_Cell(site, PositionEdit(edit, number), number) for site in sites for number in range(found.get(site, 0))]


class _Runner:
    """Runs a model with each site edited, several of them in one forward if the result is the same."""

    def __init__(
        self,
        model: nn.Module,
        given: Arguments,
        metric: Callable[[Any], Any],
        output: Any,
        batch: int | None,
    ) -> None:
        self.model = model
        self.given = given
        self.metric = metric
        self.output = output
        self.size = _common_length(given)
        self.batch = self._batch(batch)

    def over(self, cells: list[_Cell]) -> Iterator[float]:
        """The metric of the run of each cell."""
        while cells:
            some, cells = cells[: self.batch], cells[self.batch :]
            values = self._together(some) if len(some) > 1 else None
            if values is None:
                values = [self._alone(cell) for cell in some]
            yield from values

    def _batch(self, batch: int | None) -> int:
        is_training = any(module.training for module in self.model.modules())
        if is_training or self.size is None or _common_length(self.output) != self.size:
            return 1
        return max(1, _SAMPLES // max(self.size, 1) - 1) if batch is None else batch

    def _alone(self, cell: _Cell) -> float:
        with Session(self.model, [Tap(cell.site.path, cell.edit, cell.site.port)]):
            return _number(self.metric(self.model(*self.given.args, **self.given.kwargs)))

    def _together(self, some: list[_Cell]) -> list[float] | None:
        """The metric for each of `some`; None if the samples of a batch affect one another in this model.

        The last share of the batch is not edited: its output must be that of the run without an edit.
        """
        size = self.size or 1
        total = size * (len(some) + 1)
        many = mapped(lambda t: torch.cat([t] * (len(some) + 1)) if is_batched(t, size) else t, self.given)
        taps = [
            Tap(cell.site.path, ShareEdit(cell.edit, number, size, total), cell.site.port)
            for number, cell in enumerate(some)
        ]
        try:
            with Session(self.model, taps):
                output = self.model(*many.args, **many.kwargs)
        except MixedSamplesError:
            self._run_alone()
            return None
        shares = [_rows(output, number * size, (number + 1) * size) for number in range(len(some) + 1)]
        for (_, alone), (_, shared) in zip(leaves(self.output), leaves(shares[-1]), strict=True):
            if alone.shape != shared.shape or not torch.allclose(alone, shared, rtol=1e-3, atol=1e-5, equal_nan=True):
                self._run_alone()
                return None
        return [_number(self.metric(share)) for share in shares[:-1]]

    def _run_alone(self) -> None:
        warn("the samples of a batch affect one another in this model, so each site is run alone (batch=1)")
        self.batch = 1


def _made_from(edit: Any, clean: Any) -> Edit:
    if isinstance(edit, Edit) or not callable(edit):
        raise TypeError("with source=, edit must be None or a function from the clean values to an edit")
    made = edit(clean)
    if not isinstance(made, Edit):
        raise TypeError(f"with source=, edit must return an edit, but it returned a {type(made).__name__}")
    return made


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"metric must return one number, but it returned {value!r:.80}") from error


def _sites(model: nn.Module, sites: Any, port: Port) -> list[Site]:
    """The sites that the queries select, each once."""
    found: dict[Site, None] = {}
    query: Any
    for query in queries_of(sites):
        here = port
        if isinstance(query, tuple) and len(query) == 2 and query[1] in PORTS:
            query, here = query
        found.update(dict.fromkeys(Site(path, here) for path in select(model, query)))
    if not found:
        raise SelectionError("sites is empty: name at least one module")
    return list(found)


def _clean(
    model: nn.Module, sites: list[Site], given: Arguments, metric: Callable[[Any], Any]
) -> tuple[CleanRun, float]:
    """The values at the sites in a run on the clean input, and the metric of its output."""
    ports = {site.port for site in sites} & {"input", "output"}
    if not ports:
        raise ValueError(f"source= patches inputs and outputs, not {sites[0].port}")
    paths = dict.fromkeys(site.path for site in sites)
    for path, module in select(model, *paths).items():  # edits of heads act on the input of the output projection
        for name in (name for name in PROJECTIONS if name in dict(module.named_modules())):
            paths[f"{path}.{name}" if path else name] = None
            ports.add("input")
    clean = CleanRun(model, paths, ports)
    return clean, _number(metric(clean.run(given)))


def _common_length(value: Any) -> int | None:
    """The size of the first dimension, if it is the same for all tensors in `value`."""
    sizes = {tensor.shape[0] if tensor.dim() else None for _, tensor in leaves(value)}
    return sizes.pop() if len(sizes) == 1 else None


def _rows(value: Any, first: int, last: int) -> Any:
    """Some rows of every tensor in `value`."""
    return mapped(lambda tensor: tensor[first:last], value)


def _recovered(value: float, baseline: float, clean: float | None) -> float | None:
    if clean is None:
        return None
    return (value - baseline) / (clean - baseline) if clean != baseline else float("nan")
