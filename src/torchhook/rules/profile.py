"""A `Profile` is what a model's layers were like on data that was good, to hold live batches against."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.core.batch import Batch, call, on_device
from torchhook.core.findings import Report
from torchhook.core.model_state import buffers_kept
from torchhook.core.selection import Query, walk
from torchhook.rules.check import check
from torchhook.rules.history import History, finite, joined, settled
from torchhook.rules.registry import Choice
from torchhook.stats import Histogram
from torchhook.stats.histogram import Bins
from torchhook.stats.measure import measure
from torchhook.stats.reading import Place, Reading, Snapshot

VERSION = 1


@dataclass(frozen=True)
class Known:
    """What a profile knows of one place.

    The bins, the unit that distances are told in, how far its own batches are from the others, how large they are, and
    the mean of all values, which older files do not have.
    """

    state: Tensor
    unit: float
    noise: float
    size: float
    mean: float = math.nan

    @property
    def bins(self) -> Bins:
        """How the values are distributed."""
        return _bins(self.state)

    def distance(self, live: Reading) -> float:
        """How far the values of `live` are from these, in units."""
        shift, wider = live.mean - self.mean, live.std - self.unit
        return _distance(self.bins.distance(live.histogram()), shift, wider, self.mean, self.unit) / self.unit


class Profile:
    """How the outputs of layers are distributed, by place; see `Profile.of`."""

    def __init__(self, places: dict[Place, Known], model: str) -> None:
        self.places = places
        self.model = model

    @classmethod
    def of(cls, model: nn.Module, data: Iterable[Any], *queries: Query) -> Profile:
        """The profile of `model` on the batches of `data`, of the outputs that `queries` select (none: every leaf).

        A batch is a tensor, a tuple whose last item is the target and is not used, or a dict of keywords. The model is
        run as it is, without gradients; put it into eval mode first, if that is how it will be run.

        >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
        >>> profile = Profile.of(model, [torch.randn(64, 4) for _ in range(8)])
        >>> profile.check(model, torch.randn(64, 4)).ok
        True
        >>> [finding.site for finding in profile.check(model, torch.randn(64, 4) * 20).findings]
        ['0']
        """
        windows = list(_measured(model, data, queries))
        if len(windows) < 2:
            raise ValueError(f"a profile needs two batches or more, to know how they differ; data has {len(windows)}")
        whole = settled(joined(windows))
        return cls({place: known_of(whole[place], place, windows) for place in whole}, type(model).__name__)

    def check(
        self, model: nn.Module, data: Any, rules: Iterable[Choice] | None = None, fail_on: str = "error"
    ) -> Report:
        """Where `model` differs from the profile on a live batch, or on a list of them."""
        paths = list(dict.fromkeys(path for path, _ in self.places))
        gone = [path for path in paths if path not in {known for known, _ in walk(model)}]
        if gone:
            raise ValueError(f"the profile is of another model, a {self.model}: this one has no {gone[0]!r}")
        history = History(profile=self)
        batches = data if isinstance(data, list) else [data]
        for step, window in enumerate(_measured(model, batches, paths)):
            history.add(step, window)
        report = check(history, rules or ["TH101", "TH901"], fail_on=fail_on, model=self.model)
        silent = [path for path in paths if not any(path == known for known, _ in history.whole().rows)]
        notes = [f"{path!r} is in the profile and did not run" for path in silent]
        return replace(report, notes=tuple(notes))

    def save(self, path: str | Path) -> None:
        """Write it to a file, as tensors and JSON: nothing in it is ever executed."""
        places = [
            {"path": path, "port": port, **{name: getattr(known, name) for name in ("unit", "noise", "size", "mean")}}
            for (path, port), known in self.places.items()
        ]
        about = {"torchhook_profile": VERSION, "model": self.model, "places": places}
        states = {str(number): known.state.contiguous() for number, known in enumerate(self.places.values())}
        _safetensors().torch.save_file(states, path, metadata={"torchhook": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read it back.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "profile.safetensors"
        >>> Profile.of(nn.ReLU(), [torch.randn(8, 4) for _ in range(2)]).save(file)
        >>> Profile.load(file)
        Profile of ReLU: 1 place
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        try:
            with _safetensors().safe_open(str(path), "pt") as file:
                about = json.loads((file.metadata() or {}).get("torchhook", "{}"))
                version = about.get("torchhook_profile")
                known = about["places"] if version == VERSION else []
                states = [file.get_tensor(str(number)) for number in range(len(known))]
        except ImportError:
            raise
        except Exception as error:
            raise ValueError(f"{str(path)!r} is no profile, or a broken one: {error}") from error
        if version != VERSION:
            raise ValueError(f"{str(path)!r} is no profile of version {VERSION}, but of {version}")
        places = {
            (place["path"], place["port"]): Known(
                state, place["unit"], place["noise"], place["size"], place.get("mean", math.nan)
            )
            for place, state in zip(known, states, strict=True)
        }
        return cls(places, about["model"])

    def __repr__(self) -> str:
        return f"Profile of {self.model}: {len(self.places)} place{'s' if len(self.places) != 1 else ''}"


def _measured(model: nn.Module, data: Iterable[Any], queries: Iterable[Query]) -> Iterator[Snapshot]:
    """What the outputs are like, batch by batch; buffers that a forward changes are put back."""
    measured = measure(model, *queries, stats=("moments", "histogram"), on_silent="ignore")
    with buffers_kept(model), torch.no_grad(), measured as stats:
        for batch in data:
            call(model, Batch.of(on_device(batch, model)))
            yield settled(stats.snapshot())
            stats.reset()


def known_of(whole: Reading, place: Place, windows: list[Snapshot]) -> Known:
    """What is known of a place: how its values were in all, and how far parts of the data were from that."""
    state, said = whole.state(Histogram.name), whole["moments"]
    unit = said.std if said.std > 0 else abs(said.mean) or 1.0
    parts = [window[place] for window in windows if place in window.rows]
    noise = max(finite(_from_rest(part, whole, unit) for part in parts), default=0.0) / unit
    return Known(state, unit, noise, said.count / len(parts), said.mean)


def _from_rest(part: Reading, whole: Reading, unit: float) -> float:
    """How far a part of the data is from the rest of it."""
    state = part.state(Histogram.name)
    found = _bins(state).distance(_bins(whole.state(Histogram.name) - state))
    some, total = (side.count - side.nonfinite for side in (part, whole))
    if some == total:
        return math.nan
    more = total / (total - some)  # so much further is the rest, on the other side of the whole
    shift, wider = (part.mean - whole.mean) * more, (part.std - whole.std) * more
    return _distance(found, shift, wider, whole.mean, unit)


def _distance(of_bins: float, shift: float, wider: float, mean: float, unit: float) -> float:
    """The distance of histograms, no less than the shift of the mean, which the true one never is.

    Bins are up to a quarter as wide as their values are large. Where that is more than a deviation they tell nothing,
    and the distance is that of the normal distributions with these means and deviations.

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
    if not find_spec("safetensors"):
        raise ImportError('files of profiles need safetensors: pip install "torchhook[files]"')
    import safetensors
    import safetensors.torch

    return safetensors
