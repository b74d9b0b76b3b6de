"""A `Profile` is how the outputs of a model's layers were distributed on good data, to compare live batches with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, InputBatches, ToInputs, batch_count, call, on_device
from torchhook.core.errors import FileError
from torchhook.core.findings import Report
from torchhook.core.model_state import buffers_kept
from torchhook.core.optional import require
from torchhook.core.progress import Progress, track
from torchhook.core.selection import Query, walk
from torchhook.core.untrusted import built, json_of
from torchhook.rules.check import check
from torchhook.rules.history import History, finite, joined, settled
from torchhook.rules.registry import Choice
from torchhook.stats import Histogram
from torchhook.stats.histogram import Bins
from torchhook.stats.measure import measure
from torchhook.stats.reading import Place, Reading, Snapshot

VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """How the output at one place was distributed on good data."""

    state: Tensor  # of the histogram
    unit: float  # the standard deviation, in which distances are measured
    noise: float  # the largest distance of one batch from all others
    size: float  # values per batch
    mean: float = math.nan  # which older files do not have

    @property
    def bins(self) -> Bins:
        """The histogram of the values."""
        return _bins(self.state)

    def distance(self, live: Reading) -> float:
        """The distance of the values of `live` from these, in standard deviations."""
        shift, wider = live.mean - self.mean, live.std - self.unit
        return _distance(self.bins.distance(live.histogram()), shift, wider, self.mean, self.unit) / self.unit


class Profile:
    """How the outputs of layers were distributed on good data, by place; see `Profile.of`."""

    def __init__(self, places: dict[Place, LayerProfile], model: str) -> None:
        self.places = places
        self.model = model

    @classmethod
    def of(
        cls,
        model: nn.Module,
        data: Any,
        *queries: Query,
        batch_to_inputs: ToInputs | None = None,
        progress: Progress = True,
    ) -> Profile:
        """The profile of `model` on the batches of `data`, for the outputs that `queries` select (none: every leaf).

        A batch is a tensor, a tuple whose last item is the target and is ignored, a dict of keyword arguments, or what
        `batch_to_inputs` turns into one of these. The model is run in its current mode, without gradients: call
        ``model.eval()`` first if it will run that way.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> profile = Profile.of(model, [torch.randn(64, 4) for _ in range(8)])
        >>> profile.check(model, torch.randn(64, 4)).ok
        True
        >>> [finding.site for finding in profile.check(model, torch.randn(64, 4) * 20).findings]
        ['0']
        """
        batches = InputBatches(data, model, batch_to_inputs, "data")
        windows = list(track(_measured(model, batches, queries), batch_count(batches), "profile", progress))
        if len(windows) < 2:
            raise ValueError(f"a profile needs at least two batches, to learn how they differ; data has {len(windows)}")
        whole = settled(joined(windows))
        return cls({place: layer_profile(whole[place], place, windows) for place in whole}, type(model).__name__)

    def check(
        self,
        model: nn.Module,
        data: Any,
        rules: Iterable[Choice] | None = None,
        fail_on: str = "error",
        *,
        batch_to_inputs: ToInputs | None = None,
    ) -> Report:
        """Report where `model` differs from the profile on a live batch, or on several."""
        paths = list(dict.fromkeys(path for path, _ in self.places))
        gone = [path for path in paths if path not in {known for known, _ in walk(model)}]
        if gone:
            raise ValueError(f"the profile is of another model, a {self.model}: this one has no module {gone[0]!r}")
        history = History(profile=self)
        batches = InputBatches(data, model, batch_to_inputs, "data")
        for step, window in enumerate(_measured(model, batches, paths)):
            history.add(step, window)
        report = check(history, rules or ["TH101", "TH901"], fail_on=fail_on, model=self.model)
        silent = [path for path in paths if not any(path == known for known, _ in history.whole().rows)]
        notes = [f"{path!r} is in the profile but did not run" for path in silent]
        return replace(report, notes=tuple(notes))

    def save(self, path: str | Path) -> None:
        """Write the profile to a safetensors file; loading it never executes code."""
        places = [
            {"path": path, "port": port, **{name: getattr(known, name) for name in ("unit", "noise", "size", "mean")}}
            for (path, port), known in self.places.items()
        ]
        about = {"torchhook_profile": VERSION, "model": self.model, "places": places}
        states = {str(number): known.state.contiguous() for number, known in enumerate(self.places.values())}
        _safetensors().torch.save_file(states, path, metadata={"torchhook": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile from a file.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "profile.safetensors"
        >>> Profile.of(nn.ReLU(), [torch.randn(8, 4) for _ in range(2)]).save(file)
        >>> Profile.load(file)
        Profile of ReLU: 1 place
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"no such file: {str(path)!r}")
        try:
            with _safetensors().safe_open(str(path), "pt") as file:
                about = json_of((file.metadata() or {}).get("torchhook", "{}"))
                version = about.get("torchhook_profile")
                saved = built(_Saved, about) if version == VERSION else None
                places = {} if saved is None else saved.profiles(file.get_tensor)
        except ImportError:
            raise
        except Exception as error:
            raise FileError(f"{str(path)!r} is not a profile, or it is corrupt: {error}") from error
        if saved is None:
            raise FileError(f"{str(path)!r} is not a profile of version {VERSION}: its version is {version!r:.40}")
        return cls(places, saved.model)

    def __repr__(self) -> str:
        return f"Profile of {self.model}: {len(self.places)} place{'s' if len(self.places) != 1 else ''}"


@dataclass(frozen=True)
class _SavedPlace:
    """The profile of one place in a file, without its histogram."""

    path: str
    port: str
    unit: float
    noise: float
    size: float
    mean: float = math.nan

    def profile(self, state: Tensor) -> LayerProfile:
        """The profile with its histogram; raises a ValueError unless all numbers are possible."""
        if state.shape != (Histogram.width,) or state.dtype != torch.float64:
            raise ValueError(
                f"the histogram of {self.path!r:.80} has {state.dtype} values of shape {tuple(state.shape)}"
            )
        if not bool(((state >= 0) & (state < 2**53)).all()):
            raise ValueError(f"the histogram of {self.path!r:.80} has impossible counts")
        if not (0 < self.unit < math.inf and 0 <= self.noise < math.inf and 0 <= self.size < math.inf):
            raise ValueError(f"unit, noise or size of {self.path!r:.80} is not possible")
        return LayerProfile(state, self.unit, self.noise, self.size, self.mean)


@dataclass(frozen=True)
class _Saved:
    """A profile in a file, without its histograms."""

    torchhook_profile: int
    model: str
    places: tuple[_SavedPlace, ...]

    def profiles(self, tensor: Callable[[str], Tensor]) -> dict[Place, LayerProfile]:
        """The profiles by place; `tensor` reads a histogram by its number."""
        return {(place.path, place.port): place.profile(tensor(str(at))) for at, place in enumerate(self.places)}


def _measured(model: nn.Module, data: Iterable[Any], queries: Iterable[Query]) -> Iterator[Snapshot]:
    """Statistics of the outputs, batch by batch; buffers that a forward changes are restored."""
    measured = measure(model, *queries, stats=("moments", "histogram"), on_silent="ignore")
    with buffers_kept(model), torch.no_grad(), measured as stats:
        for batch in data:
            call(model, Batch.of(on_device(batch, model)))
            yield settled(stats.snapshot())
            stats.reset()


def layer_profile(whole: Reading, place: Place, windows: list[Snapshot]) -> LayerProfile:
    """The profile of one place: the distribution of all values, and how far parts of the data are from the rest."""
    state, moments = whole.state(Histogram.name), whole["moments"]
    unit = moments.std if moments.std > 0 else abs(moments.mean) or 1.0
    parts = [window[place] for window in windows if place in window.rows]
    noise = max(finite(_from_rest(part, whole, unit) for part in parts), default=0.0) / unit
    return LayerProfile(state, unit, noise, moments.count / len(parts), moments.mean)


def _from_rest(part: Reading, whole: Reading, unit: float) -> float:
    """The distance of a part of the data from the rest."""
    state = part.state(Histogram.name)
    found = _bins(state).distance(_bins(whole.state(Histogram.name) - state))
    some, total = (side.count - side.nonfinite for side in (part, whole))
    if some == total:
        return math.nan
    more = total / (total - some)  # the rest lies on the other side of the whole, so it is this much further away
    shift, wider = (part.mean - whole.mean) * more, (part.std - whole.std) * more
    return _distance(found, shift, wider, whole.mean, unit)


def _distance(of_bins: float, shift: float, wider: float, mean: float, unit: float) -> float:
    """The distance of histograms, but at least the shift of the mean, which the true distance never falls below.

    Bins are up to a quarter as wide as their values are large. Where that is more than a standard deviation, they are
    too coarse, and the distance is that of normal distributions with these means and deviations.

    >>> _distance(0.0, 20.0, 0.0, 1000.0, 1.0), _distance(0.4, 0.3, 0.1, 0.0, 1.0)
    (20.0, 0.4)
    """
    if math.isnan(of_bins) or math.isnan(shift):
        return of_bins
    if abs(mean) > 4 * unit:
        return math.hypot(shift, 0.0 if math.isnan(wider) else wider)
    return max(of_bins, abs(shift))


def _bins(state: Tensor) -> Bins:
    return Histogram().compute(state)


def _safetensors() -> Any:
    """The library safetensors, with its module for torch."""
    require("safetensors.torch", "files", "saving and loading profiles")
    return require("safetensors", "files", "saving and loading profiles")
