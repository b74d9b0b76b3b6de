"""Sweeps: one site after the other is edited, and a metric says what each does to the output."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor, nn

from torchhook.captures.capture import capture
from torchhook.core.edit import Edit
from torchhook.core.errors import SelectionError
from torchhook.core.progress import track
from torchhook.core.selection import Query, Selector, require_module, select
from torchhook.core.session import Session
from torchhook.core.site import PORTS, Port, Site
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import html_table, table, warn
from torchhook.core.trees import Arguments, leaves, mapped
from torchhook.edits import apply, patch
from torchhook.edits.ablation import PROJECTIONS

_SAMPLES = 64  # in one forward, unless `batch` says otherwise


class SweepRow(NamedTuple):
    """What the edit of one site does to the metric."""

    site: Site
    value: float
    change: float  # against the run without an edit
    recovered: float | None  # of the way from there to the clean run, with a source


class Sweep(Sequence[SweepRow]):
    """The rows of a sweep in the order of the sites, with what they are compared to."""

    def __init__(self, rows: list[SweepRow], baseline: float, clean: float | None) -> None:
        self.rows = rows
        self.baseline = baseline
        self.clean = clean

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain dictionaries, for pandas and the like."""
        return [{"path": row.site.path, "port": row.site.port, **row._asdict()} for row in self.rows]

    def best(self, count: int = 5) -> list[SweepRow]:
        """The rows that change most."""
        return sorted(self.rows, key=lambda row: -abs(row.change))[:count]

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"{self._title()}\n{table(self._header(), self._cells())}"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self._title())}</p>{html_table(self._header(), self._cells())}"

    def _title(self) -> str:
        clean = "" if self.clean is None else f", clean run {self.clean:.4g}"
        return f"Sweep over {len(self)} sites: without an edit {self.baseline:.4g}{clean}"

    def _header(self) -> tuple[str, ...]:
        return ("site", "port", "value", "change", *(() if self.clean is None else ("recovered",)))

    def _cells(self) -> list[list[Any]]:
        rows = []
        for row in self.rows:
            cells = [row.site.path or "''", row.site.port, f"{row.value:.4g}", f"{row.change:+.4g}"]
            rows.append(cells if row.recovered is None else [*cells, f"{row.recovered:.1%}"])
        return rows


def sweep(
    model: nn.Module,
    x: Any,
    sites: Query | Iterable[Any],
    edit: Edit | Callable[[Any], Any] | None,
    metric: Callable[[Any], Any],
    source: Any = None,
    *,
    port: Port = "output",
    batch: int | None = None,
    progress: TextIO | None = sys.stderr,
) -> Sweep:
    """Edit each of `sites` in turn, run `model` on `x`, and tell what `metric` says of the output.

    With `source`, the clean input, each site is patched from the clean run into the run on `x`: activation
    patching. Then `edit` is None, or makes an edit of the capture: ``lambda clean: edits.patch(clean, ...)``.

    Args:
        x, source: An input, a tuple of positional arguments or a dict of keyword arguments.
        sites: A query, or several; or `Site` objects, or pairs of path and port.
        metric: A number of the model's output.
        batch: How many sites share a forward, each with its own copy of `x` along the first dimension. By
            itself as many as make 64 samples, in eval mode, if the model treats samples apart (this is
            checked); 1 runs each site alone.
        progress: Where to show it; only a terminal does.

    >>> from torchhook import edits, sweep
    >>> model = nn.Sequential(nn.Identity(), nn.ReLU()).eval()
    >>> sweep(model, torch.ones(1, 2), ["0", "1"], edits.scale(3.0), torch.sum)
    Sweep over 2 sites: without an edit 2
    site  port    value  change
    0     output  6      +4
    1     output  6      +4
    """
    require_module(model)
    if batch is not None:
        require_count(batch, "batch")
    places = _places(model, sites, port)
    given, clean_value = Arguments.of(x), None
    if model.training:
        warn("the model is in training mode, so its dropout and batch statistics change the metric too; call .eval()")
    change = edit
    with torch.no_grad():
        output = model(*given.args, **given.kwargs)
        baseline = _number(metric(output))
        if source is not None:
            clean, clean_value = _clean(model, places, Arguments.of(source), metric)
            change = patch(clean) if edit is None else _made(edit, clean)
        if change is None:
            raise ValueError("edit is None, which means patching from source=, and there is none")
        made = change if isinstance(change, Edit) else apply(change)
        runs = _Runs(model, given, made, metric, output, batch)
        values = list(track(runs.over(places), len(places), "sweep", progress))
    rows = [SweepRow(site, value, value - baseline, _share(value, baseline, clean_value)) for site, value in values]
    return Sweep(rows, baseline, clean_value)


class _Runs:
    """Runs a model with each site edited, several of them in one forward where that is the same."""

    def __init__(
        self,
        model: nn.Module,
        given: Arguments,
        edit: Edit,
        metric: Callable[[Any], Any],
        output: Any,
        batch: int | None,
    ) -> None:
        self.model = model
        self.given = given
        self.edit = edit
        self.metric = metric
        self.output = output
        self.size = _samples(given)
        self.batch = self._batch(batch)

    def over(self, places: list[Site]) -> Iterator[tuple[Site, float]]:
        """Each site with the metric of its run."""
        while places:
            some, places = places[: self.batch], places[self.batch :]
            values = self._together(some) if len(some) > 1 else None
            if values is None:
                values = [self._alone(site) for site in some]
            yield from zip(some, values, strict=True)

    def _batch(self, batch: int | None) -> int:
        if self.size is None or _samples(self.output) != self.size or any(m.training for m in self.model.modules()):
            return 1
        return max(1, _SAMPLES // max(self.size, 1) - 1) if batch is None else batch

    def _alone(self, site: Site) -> float:
        with Session(self.model, [Tap(site.path, self.edit, site.port)]):
            return _number(self.metric(self.model(*self.given.args, **self.given.kwargs)))

    def _together(self, some: list[Site]) -> list[float] | None:
        """The metric for each of `some`, None if this model does not keep samples apart.

        The last share of the batch is not edited: it must come out as it did alone.
        """
        size = self.size or 1
        total = size * (len(some) + 1)
        many = mapped(lambda t: torch.cat([t] * (len(some) + 1)) if _is_batched(t, size) else t, self.given)
        taps = [Tap(site.path, Share(self.edit, number, size, total), site.port) for number, site in enumerate(some)]
        try:
            with Session(self.model, taps):
                output = self.model(*many.args, **many.kwargs)
        except NotApartError:
            self._run_alone()
            return None
        shares = [_rows(output, number * size, (number + 1) * size) for number in range(len(some) + 1)]
        for (_, alone), (_, shared) in zip(leaves(self.output), leaves(shares[-1]), strict=True):
            if alone.shape != shared.shape or not torch.allclose(alone, shared, rtol=1e-3, atol=1e-5, equal_nan=True):
                self._run_alone()
                return None
        return [_number(self.metric(share)) for share in shares[:-1]]

    def _run_alone(self) -> None:
        warn("this model does not treat the samples of a batch apart, so each site is run alone (batch=1)")
        self.batch = 1


class NotApartError(Exception):
    """A value that has no share for each site."""


class Share(Edit):
    """An edit of one share of the batch alone."""

    def __init__(self, edit: Edit, number: int, size: int, total: int) -> None:
        super().__init__(edit.at)
        self.edit = edit
        self.number = number
        self.size = size
        self.total = total
        self.whole = edit.whole

    def moved(self, path: str, module: nn.Module, port: Port, model: nn.Module) -> tuple[str, nn.Module, Port]:
        return self.edit.moved(path, module, port, model)

    def bound(self, site: Site, module: nn.Module) -> Edit:
        twin = Share(self.edit.bound(site, module), self.number, self.size, self.total)
        twin.by_call = twin.edit.by_call
        return twin

    def change(self, x: Any, call: int) -> Any:
        if any(not _is_batched(tensor, self.total) for _, tensor in leaves(x)):
            raise NotApartError
        first, last = self.number * self.size, (self.number + 1) * self.size
        if not self.whole:
            return torch.cat([x[:first], self.edit.change(x[first:last], call), x[last:]])
        new = self.edit.change(_rows(x, first, last), call)
        news = iter([tensor for _, tensor in leaves(new)])
        return mapped(lambda t: torch.cat([t[:first], next(news), t[last:]]), x)


def _made(edit: Any, clean: Any) -> Edit:
    if isinstance(edit, Edit) or not callable(edit):
        raise TypeError("with source=, edit is None or a function of the clean capture that returns an edit")
    made = edit(clean)
    if not isinstance(made, Edit):
        raise TypeError(f"with source=, edit must return an edit, and it returned a {type(made).__name__}")
    return made


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"metric must return one number, and it returned {value!r:.80}") from error


def _places(model: nn.Module, sites: Any, port: Port) -> list[Site]:
    queries = [sites] if isinstance(sites, (str, Selector, nn.Module)) or not isinstance(sites, Iterable) else sites
    places: dict[Site, None] = {}
    for query in queries:
        here = port
        if isinstance(query, tuple) and len(query) == 2 and query[1] in PORTS:
            query, here = query
        places.update(dict.fromkeys(Site(path, here) for path in select(model, query)))
    if not places:
        raise SelectionError("sites is empty: name at least one place of the model")
    return list(places)


def _clean(model: nn.Module, places: list[Site], given: Arguments, metric: Callable[[Any], Any]) -> tuple[Any, float]:
    ports = {site.port for site in places}
    paths = dict.fromkeys(site.path for site in places)
    for path, module in select(model, *paths).items():  # edits of heads act where their projection begins
        for name in (name for name in PROJECTIONS if name in dict(module.named_modules())):
            paths[f"{path}.{name}" if path else name] = None
            ports.add("input")
    with capture(model, *paths, inputs="input" in ports, outputs="output" in ports, on_silent="ignore") as clean:
        output = model(*given.args, **given.kwargs)
    return clean, _number(metric(output))


def _samples(value: Any) -> int | None:
    """The size of the first dimension, if all tensors in `value` have the same."""
    sizes = {tensor.shape[0] if tensor.dim() else None for _, tensor in leaves(value)}
    return sizes.pop() if len(sizes) == 1 else None


def _rows(value: Any, first: int, last: int) -> Any:
    """Some rows of every tensor in `value`."""
    return mapped(lambda tensor: tensor[first:last], value)


def _is_batched(tensor: Tensor, size: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == size


def _share(value: float, baseline: float, clean: float | None) -> float | None:
    if clean is None:
        return None
    return (value - baseline) / (clean - baseline) if clean != baseline else float("nan")
