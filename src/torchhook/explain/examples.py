"""The inputs of a whole data set that activate a unit most, and where in them; memory grows with `k`, not the data."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, InputBatches, ToInputs, batch_count, call, main_tensor, on_device, samples_of
from torchhook.core.errors import SelectionError
from torchhook.core.event import Event
from torchhook.core.model_state import evaluating
from torchhook.core.optional import require
from torchhook.core.progress import Progress, track
from torchhook.core.renamed import renamed
from torchhook.core.result import Result
from torchhook.core.selection import Sites, queries_of, require_module, select
from torchhook.core.session import Session
from torchhook.core.tap import Tap, require_count
from torchhook.core.text import shape_of
from torchhook.core.trees import Arguments, leaves, mapped
from torchhook.explain.untrained import warn_of_untrained
from torchhook.stats.channels import Channels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

By = Literal["max", "mean"]
_COLUMNS = 5  # of a grid
_CHANNELS = (1, 3, 4)  # of an image


class Example(NamedTuple):
    """One input that activates a unit strongly."""

    unit: int
    value: float
    sample: int  # its index, in the order of the loader
    position: tuple[int, ...]  # where in the output the unit is strongest; empty if it has one value per sample
    box: tuple[float, ...] | None  # roughly where in the input that is: x0, y0, x1, y1 of an image
    input: Any  # the sample itself, on the CPU; None if inputs=False


class Examples(Result, Sequence[Example]):
    """The examples of each unit, strongest first, one unit after the other."""

    def __init__(self, site: str, by: By, samples: int, found: dict[int, list[Example]]) -> None:
        self.site = site
        self.by = by
        self.samples = samples  # how many the loader had
        self.found = found

    def of(self, unit: int) -> list[Example]:
        """The examples of one unit."""
        if unit not in self.found:
            raise KeyError(f"no examples of unit {unit!r}, only of {', '.join(map(str, self.found))}")
        return self.found[unit]

    def figure(self) -> Figure:
        """The inputs side by side, each with the box that activates the unit. Needs images and matplotlib."""
        from torchhook.plot.cams import picture_of
        from torchhook.plot.style import SMALL, new_figure
        from torchhook.render.palette import VERMILLION

        if not self._are_images():
            raise ValueError(
                "these examples are not images [C, H, W] with 1, 3 or 4 channels, or were not kept (inputs=False)"
            )
        columns = min(_COLUMNS, len(self))
        rows = -(-len(self) // columns)
        figure = new_figure(1.8 * columns, 2.1 * rows)
        for number, example in enumerate(self, 1):
            ax = figure.add_subplot(rows, columns, number)
            ax.imshow(picture_of(example.input).numpy(), cmap="gray", vmin=0, vmax=1)
            ax.set_axis_off()
            ax.set_title(f"{example.unit}: {example.value:.3g}", fontsize=SMALL)
            if example.box is not None:
                left, top, right, bottom = example.box
                edge = require("matplotlib.patches", "plot").Rectangle(
                    (left - 0.5, top - 0.5), right - left, bottom - top, fill=False, edgecolor=VERMILLION, linewidth=1.5
                )
                ax.add_patch(edge)
        return figure

    def __getitem__(self, index: Any) -> Any:
        return [one for some in self.found.values() for one in some][index]

    def __len__(self) -> int:
        return sum(map(len, self.found.values()))

    def _records(self) -> list[dict[str, Any]]:
        rows = [{"path": self.site, **one._asdict()} for one in self]
        return [{key: value for key, value in row.items() if key != "input"} for row in rows]

    def _picture(self) -> str:
        """The figure; empty if the inputs are not images or matplotlib is missing."""
        if not self._are_images():
            return ""
        try:
            png = self.figure()._repr_png_()  # type: ignore[attr-defined]  # a Still has it
        except ImportError:
            return ""
        return f'<img alt="" src="data:image/png;base64,{b64encode(png).decode()}">'

    def _are_images(self) -> bool:
        inputs = [one.input for one in self]
        return bool(inputs) and all(
            isinstance(one, Tensor) and one.dim() == 3 and one.shape[0] in _CHANNELS for one in inputs
        )

    def _title(self) -> str:
        units = ", ".join(map(str, self.found))
        return f"{len(self)} of {self.samples} samples, by the {self.by} of {self.site or 'the model'!r} unit {units}"

    def _printed(self) -> tuple[Sequence[str], list[list[Any]]]:
        rows = []
        for one in self:
            box = "–" if one.box is None else ", ".join(f"{side:.4g}" for side in one.box)
            where = ", ".join(map(str, one.position)) or "–"
            rows.append([one.unit, f"{one.value:.4g}", one.sample, where, box])
        return ("unit", "value", "sample", "position", "box"), rows


@renamed(site="sites")
def top_examples(
    model: nn.Module,
    loader: Any,
    sites: Sites,
    unit: int | Sequence[int],
    *,
    k: int = 9,
    by: By = "max",
    dim: int | None = None,
    call: int | None = None,
    inputs: bool = True,
    stop: bool = True,
    batch_to_inputs: ToInputs | None = None,
    progress: Progress = True,
) -> Examples:
    """The `k` samples of `loader` that activate `unit` at `sites` most, and where in them.

    Samples are ranked by the unit's largest value, or with ``by="mean"`` by its mean over all positions. NaN is
    skipped. The model runs in eval mode without gradients, and its modes are restored afterwards.

    A box is the cell of the output scaled to the input (``W / w`` pixels wide): roughly where the unit looks, not its
    whole receptive field, which is much larger in a deep layer.

    Args:
        loader: Batches: inputs, a tuple of inputs and a target, or a dict of keyword arguments.
        sites: The module whose output contains the unit.
        unit: A channel of a convolution, or a feature of a linear layer or of tokens; or several.
        dim: The dimension of the units, if the module does not determine it; by default the last of three dimensions,
            otherwise the second.
        call: Which call, if the module is called several times in a pass.
        inputs: Whether to keep the samples, on the CPU.
        stop: End each pass after the module; pass False for models that cannot be stopped, such as compiled ones.
        batch_to_inputs: Turns a batch into what the model takes, such as ``lambda batch: batch["image"]``.
        progress: True for a bar in a terminal, False for none, or a function (what, done, total).

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False))
    >>> _ = nn.init.ones_(model[0].weight)
    >>> images = torch.zeros(100, 1, 4, 4)
    >>> images[42, 0, 1, 2], images[7, 0, 0, 0] = 5.0, 3.0
    >>> top_examples(model, images.split(16), "0", 1, k=2)
    2 of 100 samples, by the max of '0' unit 1
    unit  value  sample  position  box
       1  5          42  1, 2      2, 1, 3, 2
       1  3           7  0, 0      0, 0, 1, 1
    """
    require_module(model)
    require_count(k, "k")
    if by not in get_args(By):
        raise ValueError(f"by must be 'max' or 'mean', not {by!r}")
    loader = InputBatches(loader, model, batch_to_inputs)
    found = select(model, *queries_of(sites))
    if len(found) != 1:
        raise SelectionError(f"sites must be one module, but {len(found)} match: {', '.join(map(repr, found))}"[:300])
    warn_of_untrained(model)
    best = _Best(_units(unit), k, by, inputs)
    reader = _UnitReader(next(iter(found)), dim, call)
    with torch.no_grad(), evaluating(model):
        for data in track(loader, batch_count(loader), "batches", progress):
            batch = Batch.of(on_device(data, model))
            best.add(reader.run(model, batch, stop), batch.arguments)
    if not best.samples:
        raise ValueError("loader has no batches")
    return Examples(reader.path, by, best.samples, best.found)


class _UnitReader:
    """Runs a model on a batch and returns the output of one module."""

    def __init__(self, path: str, dim: int | None, call: int | None) -> None:
        self.path = path
        self.dim = dim
        self.call = call
        self.once = False  # whether a whole pass has shown that the module is called only once

    def run(self, model: nn.Module, batch: Batch, stop: bool) -> Tensor:
        """The output of the module as samples × units × positions…"""
        seen: list[Event] = []
        with Session(model, [Tap(self.path, seen.append)], stop=stop and self.once):
            call(model, batch)
        if len(seen) > 1 and self.call is None:
            raise ValueError(
                f"{self.path!r} is called {len(seen)} times in a pass; choose one with call=0 to call={len(seen) - 1}"
            )
        self.once = len(seen) == 1
        number = self.call or 0
        if not -len(seen) <= number < len(seen):
            raise ValueError(
                f"call must be 0 to {len(seen) - 1}, not {number}: {self.path!r} is called {len(seen)} times"
            )
        return self._by_unit(seen[number], _length(batch))

    def _by_unit(self, event: Event, samples: int | None) -> Tensor:
        x = main_tensor(event.value)
        if samples is not None and (not x.dim() or len(x) != samples):
            raise ValueError(
                f"{self.path!r} returned {shape_of(x)} for {samples} samples; its first dimension must be samples"
            )
        if x.dim() == 1:
            return x[:, None]
        units = Channels(self.dim).bound(event.module)
        assert isinstance(units, Channels)
        return x.movedim(units.placed(x)[1], 1)


class _Best:
    """The best examples of each unit so far."""

    def __init__(self, units: list[int], k: int, by: By, inputs: bool) -> None:
        self.units = units
        self.k = k
        self.by = by
        self.inputs = inputs
        self.samples = 0
        self.found: dict[int, list[Example]] = {unit: [] for unit in units}

    def add(self, x: Tensor, given: Arguments) -> None:
        """Add a batch of outputs, samples × units × positions…, and the inputs they belong to."""
        wrong = [unit for unit in self.units if unit >= x.shape[1]]
        if wrong:
            raise ValueError(f"unit {wrong[0]} is out of range: there are {x.shape[1]} units, 0 to {x.shape[1] - 1}")
        values, positions = self._values(x[:, self.units].flatten(2) if x.dim() > 2 else x[:, self.units, None])
        order = values.masked_fill(values.isnan(), -torch.inf).argsort(dim=0, descending=True, stable=True)[: self.k]
        columns = [picked.t().tolist() for picked in (values.gather(0, order), order, positions.gather(0, order))]
        for unit, *column in zip(self.units, *columns, strict=True):
            self._merge(unit, list(zip(*column, strict=True)), x.shape, given)
        self.samples += len(x)

    def _values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The value of each unit for each sample, NaN if it has only NaN, and where it is strongest."""
        x = x.float() if x.element_size() < 4 else x
        most, positions = x.masked_fill(x.isnan(), -torch.inf).max(2)
        return (x.nanmean(2) if self.by == "mean" else most.masked_fill(x.isnan().all(2), torch.nan)), positions

    def _merge(self, unit: int, column: list[tuple[Any, ...]], shape: torch.Size, given: Arguments) -> None:
        """Add the samples that beat the worst so far; of equal ones the earlier stays."""
        best, known = self.found[unit], {one.sample: one.input for some in self.found.values() for one in some}
        for value, row, place in column:
            if value != value or (len(best) == self.k and value <= best[-1].value):
                continue
            number, sample = self.samples + row, _sample(given, row, shape[0])
            position = _unravelled(place, shape[2:])
            kept = (known[number] if number in known else mapped(_to_cpu, sample)) if self.inputs else None
            best.append(Example(unit, value, number, position, _box(position, shape[2:], sample), kept))
            best.sort(key=lambda one: (-one.value, one.sample))
            del best[self.k :]


def _units(unit: Any) -> list[int]:
    units = [unit] if isinstance(unit, int) else list(unit) if isinstance(unit, Iterable) else [unit]
    if not units or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in units):
        raise ValueError(f"unit must be an integer from 0, or several, not {unit!r:.80}")
    return list(dict.fromkeys(units))


def _length(batch: Batch) -> int | None:
    """The number of samples in a batch; None if it has no tensor with rows."""
    return samples_of(batch).length if any(tensor.dim() for _, tensor in leaves(batch.arguments)) else None


def _sample(given: Arguments, row: int, samples: int) -> Any:
    """One sample of a batch: its row of every tensor that has one row per sample."""
    one: Arguments = mapped(lambda t: t[row] if t.dim() and len(t) == samples else t, given)
    return one.unwrapped()


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # a copy, since a view of a row would keep the whole batch in memory


def _unravelled(place: int, shape: torch.Size) -> tuple[int, ...]:
    position: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        position.insert(0, rest)
    return tuple(position)


def _box(position: tuple[int, ...], shape: torch.Size, sample: Any) -> tuple[float, ...] | None:
    """The cell scaled to the input, if both have a spatial extent: lower ends, then upper ends, x before y."""
    tensor = next((leaf for _, leaf in leaves(sample)), None)
    if len(position) < 2 or tensor is None or tensor.dim() != len(shape) + 1:  # a single dimension may be tokens
        return None
    steps = [size / cells for size, cells in zip(tensor.shape[1:], shape, strict=True)]
    low = [place * step for place, step in zip(position, steps, strict=True)]
    high = [(place + 1) * step for place, step in zip(position, steps, strict=True)]
    return (*reversed(low), *reversed(high))
