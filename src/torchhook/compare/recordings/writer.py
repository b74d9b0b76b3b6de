"""Writes a recording while a model runs: values wait until there are enough for a file, which a thread writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchhook.compare.recordings.files import (
    LINES,
    VALUES,
    About,
    Line,
    StoredTensor,
    plain_values,
    write_about,
    write_tensors,
)
from torchhook.compare.recordings.sketch import Sketch, begun, home, is_small
from torchhook.core.errors import FileError
from torchhook.core.snapshot import read
from torchhook.core.torch_internals import version_of
from torchhook.core.transfer import Transfer

_ENOUGH = 64 * 2**20  # bytes that are written together

Reader = Callable[[], dict[str, Tensor]]
"""Waits for values that are on their way to the host, and returns them by their keys."""


class RecordingWriter:
    """A recording in the making, in a new folder."""

    def __init__(self, folder: Path, about: About) -> None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileError(f"to: {str(folder)!r} exists already; choose another name, or delete it first")
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.keep = about.keep
        write_about(folder, about)
        self._lines = (folder / LINES).open("ab")
        self._known: Any = WeakTensorKeyDictionary()  # tensors that are stored already, and where
        self._transfer = Transfer(torch.device("cpu"), None)
        self._waiting: list[Line] = []
        self._readers: list[Reader] = []
        self._sketches: dict[tuple[torch.device, Any], dict[str, Sketch]] = {}  # by device and stream, then key
        self._bytes = self._tensors = self._files = 0
        self._pool = ThreadPoolExecutor(1, "torchhook")
        self._written: Future[None] | None = None

    def add(
        self,
        line: Line,
        tensors: Sequence[Tensor],
        live: Sequence[Tensor],
        whole: bool = False,
        shards: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        """Add a value with these tensors; `live` are the model's own ones.

        With `whole`, more than sketches of them is kept. `shards` says which parts of a larger tensor they are.
        """
        stored = tuple(self._stored(*pair, line.port, whole) for pair in zip(tensors, live, strict=True))
        stored = tuple(replace(one, shards=shards) for one in stored) if shards else stored
        self._waiting.append(replace(line, tensors=stored))
        if self._bytes >= _ENOUGH:
            self.flush()

    def flush(self) -> None:
        """Write what waits, in another thread; waits for what was written before."""
        if self._written is not None:
            self._written.result()
        if not self._waiting:
            return
        self._readers += [self._sent(stream, sketches) for (_, stream), sketches in self._sketches.items()]
        self._sketches = {}
        waiting, readers, number = self._waiting, self._readers, self._files
        self._waiting, self._readers, self._bytes = [], [], 0
        self._files += bool(readers)
        self._written = self._pool.submit(self._write, waiting, readers, number)

    def close(self) -> None:
        """Write what is left, and wait for it."""
        try:
            self.flush()
            if self._written is not None:
                self._written.result()
        finally:
            self._pool.shutdown()
            self._lines.close()

    def _stored(self, tensor: Tensor, live: Tensor, port: str, whole: bool) -> StoredTensor:
        state = _version(live), port.startswith("param")
        known, where = self._known.get(live, (None, None))
        if where is not None and known == state:
            found: StoredTensor = where
            return found
        found = self._kept(tensor, port, whole or self.keep == "all")
        if state[0] is not None:
            self._known[live] = state, found
        return found

    def _kept(self, tensor: Tensor, port: str, whole: bool) -> StoredTensor:
        """Let a tensor, or its sketch, wait for the next file."""
        key, dtype = str(self._tensors), str(tensor.dtype).removeprefix("torch.")
        self._tensors += 1
        shape = tuple(tensor.shape)
        tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
        if whole or is_small(tensor):
            arriving = self._transfer(tensor.clone())  # not a copy on write, since another thread lets go of it
            self._readers.append(lambda: {key: plain_values(read(arriving))})
            self._bytes += tensor.nbytes
            return StoredTensor(shape, dtype, self._files, key)
        sketch = begun(tensor, 0 if port.startswith("param") else None)
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        self._sketches.setdefault((tensor.device, stream), {})[key] = sketch
        self._bytes += sketch.nbytes
        return StoredTensor(shape, dtype, self._files, key, sketch.dim_of_features)

    def _sent(self, stream: Any, sketches: dict[str, Sketch]) -> Reader:
        """Start copying sketches that have begun on one stream to the host."""
        with torch.cuda.stream(stream):
            arriving = home(list(sketches.values()))

        def arrived() -> dict[str, Tensor]:
            named = zip(sketches, arriving(), strict=True)
            return {
                f"{key}.{name}": plain_values(part) for key, sketch in named for name, part in sketch.parts().items()
            }

        return arrived

    def _write(self, lines: list[Line], readers: list[Reader], number: int) -> None:
        text = b"".join(
            json.dumps(_short(line), default=vars).encode() + b"\n" for line in lines
        )  # while the device is busy
        tensors = {key: tensor for read_now in readers for key, tensor in read_now().items()}
        if tensors:
            write_tensors(self.folder / VALUES.format(number), tensors)
        self._lines.write(text)
        self._lines.flush()


def _short(line: Line) -> dict[str, Any]:
    """A line without what is as usual."""
    needed = ("step", "turn")
    return {name: value for name, value in vars(line).items() if value not in (0, (), None) or name in needed}


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None if that is not counted."""
    try:
        return version_of(tensor)
    except RuntimeError:  # made in inference mode
        return None
