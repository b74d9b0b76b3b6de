"""The files of a recording: what is known of the model, a line for each value that flowed, and the tensors themselves.

A file of tensors is complete before a line names it, and lines are only ever added at the end: the recording of a run
that was killed ends with the last whole line. All are JSON and safetensors; nothing in them is executed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torchhook.captures.agreement.facts import ModuleFacts
from torchhook.captures.appendable import as_bytes
from torchhook.core.errors import FileError
from torchhook.core.result import replace_file
from torchhook.core.site import Port
from torchhook.core.untrusted import built, json_in, json_of

ABOUT, LINES, VALUES = "recording.json", "values.jsonl", "values-{:05}.safetensors"
NOISE = "noise.json"
VERSION = 1
_LONGEST = 2**26  # bytes of a line, and of the header of a file of tensors
_CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODE_OF = {dtype: code for code, dtype in _CODES.items()}
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_CODES.values(), torch.complex64, torch.complex128)}
_NAMES = {str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

Keep = Literal["all", "sketch"]


@dataclass(frozen=True)
class About:
    """What is known of a recording as a whole."""

    version: int
    model: str
    keep: Keep
    coarsest: float  # the machine epsilon of the coarsest parameter
    modules: dict[str, ModuleFacts]
    environment: dict[str, str]
    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True)
class StoredTensor:
    """A tensor, or the sketch of one: what it was like, and where it is kept."""

    shape: tuple[int, ...]
    dtype: str
    file: int
    key: str
    sketch: int | None = None  # the dimension of the features, if only a sketch is kept
    shards: tuple[tuple[int, int, int], ...] = ()  # if it is a part: dimension, number of the part, number of parts

    def __post_init__(self) -> None:
        if self.dtype not in _NAMES:
            raise ValueError(f"a tensor has the unknown dtype {self.dtype!r:.60}")

    @property
    def type(self) -> torch.dtype:
        """Its dtype; that of quantized values, which are kept as floating-point numbers, is float32."""
        return _DTYPES.get(self.dtype, torch.float32)


@dataclass(frozen=True)
class Moved:
    """How far rounding errors in what a value is computed from have moved its tensors, relative to their sizes."""

    port: Port
    path: str
    call: int
    by: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """One value that flowed: where, when, and its tensors."""

    step: int
    turn: int  # which pass of the step
    port: Port
    path: str
    call: int = 0
    leaf: int = 0
    tensors: tuple[StoredTensor, ...] = ()
    addresses: tuple[str, ...] = ()  # of the tensors within the value, as JSON
    requires_grad: tuple[bool, ...] = ()
    tree: str | None = None  # of the model's own input: the arguments around the tensors, as JSON


def write_about(folder: Path, about: About) -> None:
    """Write what is known of the recording."""
    replace_file(folder / ABOUT, json.dumps(vars(about), default=vars).encode())


def read_about(folder: Path) -> About:
    """Read what is known of the recording."""
    with _told(folder, ABOUT):
        found = json_in(folder / ABOUT)
        version = found.get("version") if isinstance(found, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise ValueError(f"a newer torchhook wrote it (version {version}, and this one reads {VERSION})")
        return built(About, found)


def read_lines(folder: Path) -> Iterator[Line]:
    """All whole lines; what follows the last one was being written when the process was killed."""
    with _told(folder, LINES), (folder / LINES).open("rb") as file:
        while text := file.readline(_LONGEST):
            if not text.endswith(b"\n"):
                if len(text) == _LONGEST:
                    raise ValueError("it has a line that is too long")
                return
            yield built(Line, _line(text))


def _line(text: bytes) -> Any:
    try:
        return json_of(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError("it has a line that is not JSON") from error


def write_noise(folder: Path, noise: Iterable[Moved]) -> None:
    """Write what is known of the effect of rounding errors."""
    replace_file(folder / NOISE, json.dumps([asdict(moved) for moved in noise]).encode())


def read_noise(folder: Path) -> tuple[Moved, ...]:
    """Read it; nothing if it is unknown."""
    with _told(folder, NOISE):
        return built(tuple[Moved, ...], json_in(folder / NOISE)) if (folder / NOISE).exists() else ()


def plain_values(tensor: Tensor) -> Tensor:
    """The values of a tensor on the host, as a file can hold them: dense, in order, complex ones as pairs."""
    tensor = tensor.detach()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    tensor = tensor if tensor.dtype in _CODE_OF else tensor.float()
    return tensor.cpu().contiguous()


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, which is there completely or not at all."""
    fields, offset = {}, 0
    for key, tensor in tensors.items():
        ends = [offset, offset := offset + tensor.nbytes]
        fields[key] = {"dtype": _CODE_OF[tensor.dtype], "shape": list(tensor.shape), "data_offsets": ends}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    draft = file.with_name(f".{file.name}")
    with draft.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            opened.write(as_bytes(tensor))
    draft.replace(file)


class TensorFile:
    """The tensors in a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _told(path.parent, path.name), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if not 2 <= length <= min(_LONGEST, size):
                raise ValueError(f"its header would have {length} bytes")
            self._start, self._size = 8 + length, size - 8 - length
            self._fields = built(dict[str, _Field], json_of(file.read(length)))

    def __getitem__(self, key: str) -> Tensor:
        with _told(self.path.parent, self.path.name):
            if key not in self._fields:
                raise ValueError(f"it has no tensor {key!r:.60}")
            field = self._fields[key]
            begin, end = field.data_offsets
            dtype = _CODES.get(field.dtype)
            if dtype is None or not begin <= end <= self._size:
                raise ValueError(f"the tensor {key!r:.60} has an unknown dtype, or is not in the file")
            if math.prod(field.shape) * dtype.itemsize != end - begin:
                raise ValueError(f"the tensor {key!r:.60} does not have the size of its shape")
            if begin == end:
                return torch.empty(field.shape, dtype=dtype)
            with self.path.open("rb") as file:
                file.seek(self._start + begin)
                data = bytearray(end - begin)
                if file.readinto(data) < len(data):
                    raise ValueError("it is shorter than its header says")
            return torch.frombuffer(data, dtype=dtype).reshape(field.shape)


@dataclass(frozen=True)
class _Field:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@contextmanager
def _told(folder: Path, name: str) -> Iterator[None]:
    """Say which recording is damaged, and why."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError, MemoryError) as error:
        if isinstance(error, FileError):
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise FileError(f"{str(folder)!r} is not a recording, or is damaged: {name}: {why}") from error
