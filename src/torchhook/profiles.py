"""A `Profile` is what a model's layers were like on data that was good, to hold live batches against."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchhook.calling import Batch, call, on_device
from torchhook.core.selection import Query
from torchhook.findings import Report
from torchhook.measuring import measure
from torchhook.rules.checking import check
from torchhook.rules.history import History, joined, settled
from torchhook.rules.registry import Choice
from torchhook.stats import Histogram
from torchhook.stats.histogram import Bins
from torchhook.stats.reading import Place, Reading, Snapshot

VERSION = 1


@dataclass(frozen=True)
class Known:
    """What a profile knows of one place: the bins, the deviation, and how far its own batches are from their whole."""

    state: Tensor
    std: float
    noise: float

    @property
    def bins(self) -> Bins:
        """How the values are distributed."""
        return Histogram().compute(self.state)


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
        if not windows:
            raise ValueError("data has no batches, and a profile is made of them")
        whole = settled(joined(windows))
        return cls({place: _known(whole[place], place, windows) for place in whole}, type(model).__name__)

    def check(
        self, model: nn.Module, data: Any, rules: Iterable[Choice] | None = None, fail_on: str = "error"
    ) -> Report:
        """Where `model` differs from the profile on a live batch, or on a list of them."""
        paths = [path for path, _ in self.places]
        history = History(profile=self)
        batches = data if isinstance(data, list) else [data]
        for step, window in enumerate(_measured(model, batches, list(dict.fromkeys(paths)))):
            history.add(step, window)
        return check(history, rules or ["TH101", "TH901"], fail_on=fail_on, model=self.model)

    def save(self, path: str | Path) -> None:
        """Write it to a file, as tensors and JSON: nothing in it is ever executed."""
        places = [
            {"path": place[0], "port": place[1], "std": known.std, "noise": known.noise}
            for place, known in self.places.items()
        ]
        about = {"torchhook_profile": VERSION, "model": self.model, "places": places}
        states = {str(number): known.state.contiguous() for number, known in enumerate(self.places.values())}
        _safetensors().torch.save_file(states, path, metadata={"torchhook": json.dumps(about)})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read it back.

        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "profile.safetensors"
        >>> Profile.of(nn.ReLU(), [torch.randn(8, 4)]).save(file)
        >>> Profile.load(file)
        Profile of ReLU: 1 place
        """
        with _safetensors().safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {}).get("torchhook", "{}"))
            if about.get("torchhook_profile") != VERSION:
                raise ValueError(f"{str(path)!r} is no profile of version {VERSION}")
            places = {
                (known["path"], known["port"]): Known(file.get_tensor(str(number)), known["std"], known["noise"])
                for number, known in enumerate(about["places"])
            }
        return cls(places, about["model"])

    def __repr__(self) -> str:
        return f"Profile of {self.model}: {len(self.places)} place{'s' if len(self.places) != 1 else ''}"


def _measured(model: nn.Module, data: Iterable[Any], queries: Iterable[Query]) -> Iterator[Snapshot]:
    """What the outputs are like, batch by batch."""
    with torch.no_grad(), measure(model, *queries, stats=("moments", "histogram"), on_silent="ignore") as stats:
        for batch in data:
            call(model, Batch.of(on_device(batch, model)))
            yield settled(stats.snapshot())
            stats.reset()


def _known(whole: Reading, place: Place, windows: list[Snapshot]) -> Known:
    bins, std = whole.histogram(), whole.std
    distances = [bins.distance(window[place].histogram()) for window in windows if place in window.rows]
    noise = max(distances) / std if std > 0 else 0.0
    return Known(whole.state(Histogram.name), std, noise)


def _safetensors() -> Any:
    if not find_spec("safetensors"):
        raise ImportError("files of profiles need safetensors: pip install 'torchhook[files]'")
    import safetensors
    import safetensors.torch

    return safetensors
