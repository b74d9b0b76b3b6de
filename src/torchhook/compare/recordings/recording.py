"""`Recording`: what flowed in a run of a model, read from disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import torch
from torch import Tensor

from torchhook.captures.agreement.facts import ModuleFacts
from torchhook.captures.agreement.recorded_run import Location, Observation, RecordedRun
from torchhook.compare.recordings.files import (
    ABOUT,
    VALUES,
    About,
    Line,
    StoredTensor,
    TensorFile,
    read_about,
    read_lines,
    read_noise,
)
from torchhook.compare.recordings.sketch import Sketch
from torchhook.core.errors import FileError, NotRecordedError
from torchhook.core.selection import nearest
from torchhook.core.site import Site
from torchhook.core.tabular import Tabular
from torchhook.core.trees import Arguments
from torchhook.core.untrusted import json_of

RANK = "rank"
"""The folders in which the ranks of a distributed run write, and their numbers."""


class Turn(NamedTuple):
    """One pass of a model: the step of the training, and which pass of that step."""

    step: int
    number: int


class Recording(Tabular):
    """What flowed in one run of a model, or in several steps of a training, on disk; `torchhook.record` writes it.

    ``recording[path]`` is the output of a module in the first pass, ``recording[path, port]`` what flowed at another
    port. Nothing in the files is executed, and values are read when they are asked for.

    >>> import tempfile
    >>> from torch import nn
    >>> from torchhook import Recording, record
    >>> folder = tempfile.mkdtemp()
    >>> _ = record(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), torch.ones(3, 4), to=f"{folder}/a.th")
    >>> recording = Recording(f"{folder}/a.th")
    >>> recording["1"].shape, recording.model, recording.steps
    (torch.Size([3, 2]), 'Sequential', [0])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            what = "is a file; a recording is a folder" if self.path.is_file() else "does not exist"
            raise FileError(f"cannot open the recording {str(self.path)!r}: it {what}")
        several = [folder for folder in self.path.glob(f"{RANK}[0-9]*") if (folder / ABOUT).exists()]
        folders = sorted(several, key=lambda folder: (len(folder.name), folder.name))
        if not (self.path / ABOUT).exists() and not folders:
            raise FileError(f"{str(self.path)!r} is not a recording: it has no {ABOUT}")
        self.ranks = [RecordedRank(folder) for folder in folders or [self.path]]

    @property
    def model(self) -> str:
        """The class of the model."""
        return self.ranks[0].about.model

    @property
    def keep(self) -> str:
        """``"all"`` if tensors were kept, ``"sketch"`` if sketches of them were."""
        return self.ranks[0].about.keep

    @property
    def environment(self) -> dict[str, str]:
        """Versions, the device and other facts about the process."""
        return dict(self.ranks[0].about.environment)

    @property
    def steps(self) -> list[int]:
        """The steps that were recorded; without an optimizer, each pass of the model is one."""
        return list(dict.fromkeys(turn.step for turn in self.ranks[0].turns))

    def inputs(self, step: int | None = None) -> Arguments:
        """The arguments of the model in the first pass of a step (None: the first one)."""
        return self.ranks[0].inputs(step)

    def parameters(self, step: int | None = None) -> Mapping[str, Any]:
        """The parameters and buffers before a step (None: the first one), by name; read when they are looked up."""
        return self.ranks[0].parameters(self.steps[0] if step is None else step)

    def __getitem__(self, place: str | tuple[str, str]) -> Any:
        path, port = (place, "output") if isinstance(place, str) else place
        run = self.ranks[0].run(self.ranks[0].first)
        found = run.observations.get(Location(Site(path, cast("Any", port)), 0))
        if found is None:
            known = {location.site.path for location in run.observations if location.site.port == port}
            raise NotRecordedError(f"nothing was recorded at the {port} of {path!r}; {nearest(path, known)}")
        return found.tensors[0] if len(found.tensors) == 1 else list(found.tensors)

    def _records(self) -> list[dict[str, Any]]:
        return [
            {
                "step": line.step,
                "path": line.path,
                "module": rank.about.modules[line.path].kind if line.path in rank.about.modules else "",
                "port": line.port,
                "call": line.call,
                "shape": ", ".join("×".join(map(str, one.shape)) for one in line.tensors),
                "dtype": ", ".join(dict.fromkeys(one.dtype for one in line.tensors)),
                **({"rank": rank.about.rank} if len(self.ranks) > 1 else {}),
            }
            for rank in self.ranks
            for line in rank.lines
        ]

    def _title(self) -> str:
        several = f", {len(self.ranks)} ranks" if len(self.ranks) > 1 else ""
        kept = "sketches" if self.keep == "sketch" else "tensors"
        steps = f"{len(self.steps)} step{'' if len(self.steps) == 1 else 's'}"
        return f"Recording of {self.model}: {steps}{several}, {kept} in {self.path.name}"


class RecordedRank:
    """The recording of one process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about: About = read_about(folder)
        self._files: dict[int, TensorFile] = {}

    @cached_property
    def lines(self) -> list[Line]:
        """All values that were recorded, in order."""
        return list(read_lines(self.folder))

    @cached_property
    def turns(self) -> list[Turn]:
        """The passes of the model, in order."""
        return list(self._by_turn)

    def is_cut(self, turn: Turn) -> bool:
        """Whether the recording of a pass ends before the model returned."""
        ports = {line.port for line in self._by_turn.get(turn, ()) if not line.path}
        return "input" in ports and "output" not in ports

    @cached_property
    def _by_turn(self) -> dict[Turn, list[Line]]:
        """The values of each pass."""
        found: dict[Turn, list[Line]] = {}
        for line in self.lines:
            if line.port != "param":
                found.setdefault(Turn(line.step, line.turn), []).append(line)
        return found

    @cached_property
    def _moved(self) -> dict[Location, tuple[float, ...]]:
        """How far rounding errors have moved the values of the first pass."""
        return {Location(Site(one.path, one.port), one.call): one.by for one in read_noise(self.folder)}

    @property
    def first(self) -> Turn:
        """The first pass."""
        if not self.turns:
            raise FileError(f"{str(self.folder)!r} is empty: the model was not called while it was recorded")
        return self.turns[0]

    def run(self, turn: Turn, after: bool = False) -> RecordedRun:
        """What flowed in one pass, with the parameters before its step, or `after` it; read when they are asked for."""
        run = RecordedRun()
        run.modules, run.coarsest = dict(self.about.modules), self.about.coarsest
        run.parameters = self.parameters_at(turn.step + 1) if after else self.parameters(turn.step)
        run.is_sketched = self.about.keep == "sketch"
        moved = self._moved if turn == self.first else {}
        for line in self._by_turn.get(turn, ()):
            location = Location(Site(line.path, line.port), line.call, line.leaf)
            run.observations[location] = Observation(
                location,
                run.modules.get(line.path, _UNKNOWN),
                self._tensors(line.tensors),
                [_address(text) for text in line.addresses],
                list(line.requires_grad),
                moved=moved.get(location, ()),
            )
        return run

    def inputs(self, step: int | None) -> Arguments:
        """The arguments of the model in the first pass of a step."""
        at = self.first.step if step is None else step
        line = next((one for one in self.lines if (one.step, one.path, one.port) == (at, "", "input")), None)
        if line is None:
            raise NotRecordedError(f"{str(self.folder)!r} has no input of the model in step {at}")
        if line.tree is None:
            raise FileError(
                f"the input of the model in {str(self.folder)!r} cannot be rebuilt, since it has objects other than"
                " tensors, numbers and their containers; pass x="
            )
        return from_json(line.tree, self._tensors(line.tensors))

    def parameters(self, step: int) -> Mapping[str, Any]:
        """The parameters and buffers before a step, by name; those of the last step that has them."""
        found: dict[str, StoredTensor] = {}
        for line in self.lines:
            if line.port == "param" and line.step <= step and line.tensors:
                found[line.path] = line.tensors[0]
        return StoredParameters(found, self._tensor)

    def parameters_at(self, step: int) -> Mapping[str, Any]:
        """The parameters and buffers that were written before this very step."""
        lines = [line for line in self.lines if line.port == "param" and line.step == step and line.tensors]
        return StoredParameters({line.path: line.tensors[0] for line in lines}, self._tensor)

    def _tensors(self, stored: Sequence[StoredTensor]) -> Sequence[Tensor]:
        return StoredTensors(stored, self._tensor)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        """A tensor, or a sketch that stands for it."""
        if stored.file not in self._files:
            self._files[stored.file] = TensorFile(self.folder / VALUES.format(stored.file))
        file = self._files[stored.file]
        if stored.sketch is not None:
            parts = {name: file[f"{stored.key}.{name}"] for name in ("sums", "moments", "entries")}
            return cast("Tensor", Sketch(stored.shape, stored.type, stored.sketch, **parts))
        values = file[stored.key]
        values = torch.view_as_complex(values) if stored.type.is_complex else values
        if tuple(values.shape) != stored.shape:
            raise FileError(f"{str(self.folder)!r} is damaged: a tensor of shape {stored.shape} is {values.shape}")
        return values


class StoredTensors(Sequence[Tensor]):
    """Tensors on disk, each read when it is asked for."""

    def __init__(self, stored: Sequence[StoredTensor], read: Callable[[StoredTensor], Tensor]) -> None:
        self.stored = stored
        self._read = read

    @overload
    def __getitem__(self, number: int) -> Tensor: ...

    @overload
    def __getitem__(self, number: slice) -> list[Tensor]: ...

    def __getitem__(self, number: int | slice) -> Tensor | list[Tensor]:
        found = self.stored[number]
        return self._read(found) if isinstance(found, StoredTensor) else [self._read(one) for one in found]

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Their shapes, without reading them."""
        return [one.shape for one in self.stored]


class StoredParameters(Mapping[str, Any]):
    """Parameters on disk, each read when it is looked up."""

    def __init__(self, stored: Mapping[str, StoredTensor], read: Callable[[StoredTensor], Tensor]) -> None:
        self.stored = stored
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Their shapes, without reading them."""
        return {name: one.shape for name, one in self.stored.items()}


def to_json(arguments: Arguments) -> str | None:
    """The arguments of a call as JSON, with a number in place of each tensor; None if they hold other objects."""
    count = iter(range(2**31))

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"$tensor": next(count)}
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return {"$float": str(value)}
        if type(value) in (list, tuple):
            return {f"${type(value).__name__}": [plain(item) for item in value]}
        if isinstance(value, Mapping) and all(type(key) is str for key in value):
            return {"$dict": {key: plain(item) for key, item in value.items()}}
        raise TypeError(type(value).__name__)

    try:
        return json.dumps([plain(arguments.args), plain(arguments.kwargs)])
    except TypeError:
        return None


def from_json(text: str, tensors: Sequence[Tensor]) -> Arguments:
    """The arguments from JSON and their tensors."""

    def revived(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, held),) = value.items()
        if kind == "$dict":
            return {key: revived(item) for key, item in held.items()}
        if kind == "$tensor":
            return tensors[held]
        return float(held) if kind == "$float" else _CONTAINERS[kind](revived(item) for item in held)

    try:
        args, kwargs = json_of(text)
        return Arguments(revived(args), revived(kwargs))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise FileError(f"the arguments in a recording cannot be read: {error}") from error


def _address(text: str) -> tuple[Any, ...]:
    found = json_of(text)
    return tuple(found) if isinstance(found, list) else ()


_CONTAINERS: dict[str, Callable[[Any], Any]] = {"$list": list, "$tuple": tuple}
_UNKNOWN = ModuleFacts("", is_leaf=False)
