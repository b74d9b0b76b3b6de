"""Results that can be saved and opened again: `Result`, and the file that its parts are written to.

The file is a safetensors file: the tensors of the parts, and everything else as JSON in its metadata. Reading one never
runs code, and is bounded by the limits below, whoever wrote it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

from torchhook.core.errors import FileError
from torchhook.core.findings import Report
from torchhook.core.optional import require
from torchhook.core.parts import KINDS, Part, Picture, Sentence, Table
from torchhook.core.tabular import Tabular
from torchhook.core.text import in_units
from torchhook.core.untrusted import json_of

SUFFIX = ".th"
VERSION = 1
"""The version of the file; it is raised when older readers would fail."""

_KEY = "torchhook_result"
_MOST, _MOST_TEXT = 2**28, 2**24  # bytes of a file, and of the text in it


class Result(Tabular):
    """A result that can be saved, and that every page can show: what it shows are its `_parts`.

    A subclass has the methods of `Tabular`; what it draws are its `_figures`.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what the result shows to a file ending in ``.th``, JSON and safetensors in one.

        `torchhook.render.load` opens it again, and so does ``torchhook dashboard``. Reading it never executes code.
        """
        write(self._kind(), self._parts(), path)

    def _kind(self) -> str:
        """What it is, for people."""
        return type(self).__name__

    def _parts(self) -> list[Part]:
        """All that the result shows, in order."""
        return [Sentence(self._title()), *self._figures(), *self._tables(), *map(Sentence, self._foot())]

    def _figures(self) -> Sequence[Part]:
        """What is drawn of it; by default its `figure`, if it has one that can be drawn."""
        try:
            return [Picture.of(_png(self.figure()))] if hasattr(self, "figure") else []
        except (ImportError, ValueError):  # matplotlib is missing, or there is nothing to draw
            return []

    def _tables(self) -> Sequence[Table]:
        return [Table.of(self._records())]


@dataclass(frozen=True, eq=False, repr=False)
class Saved(Result):
    """A result that was read from a file: it prints and shows what the original did.

    Args:
        kind: The class of the original, such as ``"Likeness"``.
        parts: What it shows: sentences, tables, matrices and other numbers.
    """

    kind: str
    parts: tuple[Part, ...]

    def _kind(self) -> str:
        return self.kind

    def _parts(self) -> list[Part]:
        return list(self.parts)

    def _records(self) -> list[dict[str, Any]]:
        return next((part.records() for part in self.parts if isinstance(part, Table)), [])

    def _title(self) -> str:
        return next(iter(self._sentences()), "")

    def _foot(self) -> Sequence[str]:
        return self._sentences()[1:]

    def _sentences(self) -> list[str]:
        return [part.text for part in self.parts if isinstance(part, Sentence)]


def write(kind: str, parts: Sequence[Part], path: str | os.PathLike[str]) -> None:
    """Write the parts of a result of this `kind` to a file."""
    path = Path(path)
    if path.suffix != SUFFIX:
        raise ValueError(f"cannot save a result as {path.name!r}: the name of the file must end in {SUFFIX}")
    tensors: dict[str, Any] = {}
    shown = [{"part": type(part).__name__, **_plain(_fields(part), tensors)} for part in parts]
    text = json.dumps({"version": VERSION, "kind": kind, "parts": shown}, allow_nan=False)
    data = require("safetensors.torch", "files", "saving a result").save(tensors, {_KEY: text})
    if len(text) > _MOST_TEXT or len(data) > _MOST:
        limits = f"at most {in_units(_MOST_TEXT)} of text and {in_units(_MOST)} in all"
        raise ValueError(f"this {kind} is too large to be saved, {in_units(len(data))}: a result may have {limits}")
    replace_file(path, data)


def read(path: str | os.PathLike[str]) -> Saved | Report:
    """The result in a file; a report as a `Report`.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "short.th")
    >>> write("Short", [Sentence("Two layers"), Table(["path"], [["conv1"], ["fc"]])], file)
    >>> read(file)
    Two layers
    path
    conv1
    fc
    """
    path = Path(path)
    if not path.is_file():
        raise FileError(f"there is no result {str(path)!r}")
    try:
        kind, parts = _parsed(path)
    except (ImportError, FileError):
        raise
    except Exception as error:  # whatever a library says of bytes that others wrote
        raise FileError(f"{str(path)!r} is not a result that torchhook saved, or it is damaged: {error}") from error
    return parts[0] if len(parts) == 1 and isinstance(parts[0], Report) else Saved(kind, tuple(parts))


def replace_file(path: Path, data: bytes) -> None:
    """Write to a temporary file beside it, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _parsed(path: Path) -> tuple[str, list[Part]]:
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if path.stat().st_size > _MOST or header > 2 * _MOST_TEXT:  # quotes in the text are escaped there
        raise ValueError("it is too large")
    with require("safetensors", "files", "opening a result").safe_open(str(path), "pt") as opened:
        text = (opened.metadata() or {})[_KEY]
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a dict)
    found = _revived(json_of(text), tensors)
    if found["version"] != VERSION:
        said = f"{str(path)!r} has version {found['version']!r}; this torchhook reads version {VERSION}"
        raise FileError(f"{said}: update the older one")
    return str(found["kind"]), [_part(**part) for part in found["parts"]]


def _part(part: str, **given: Any) -> Part:
    made: Part = Report.from_dict(given) if part == Report.__name__ else KINDS[part](**given)
    return made


def _fields(part: Part) -> dict[str, Any]:
    return part.to_dict() if isinstance(part, Report) else {one.name: getattr(part, one.name) for one in fields(part)}


def _plain(value: Any, tensors: dict[str, Any]) -> Any:
    """`value` as JSON can hold it; its tensors go to `tensors`."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, tensors) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, tensors) for item in value]
    if hasattr(value, "detach") and value.ndim:
        tensors[name := str(len(tensors))] = value.detach().cpu().contiguous()
        return {"$tensor": name}
    return _plain(value.tolist(), tensors) if hasattr(value, "tolist") else str(value)


def _revived(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        return [_revived(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    return tensors[value["$tensor"]] if "$tensor" in value else {key: _revived(value[key], tensors) for key in value}


def _png(figure: Any) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()
