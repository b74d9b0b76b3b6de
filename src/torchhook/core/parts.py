"""What a result shows, as typed parts. A page, a notebook and a file know these few kinds, and no verb.

A part is plain data and checks itself, even if it comes from an untrusted file.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchhook.core.findings import Report
from torchhook.core.untrusted import is_number

if TYPE_CHECKING:
    from torch import Tensor

PNG = b"\x89PNG\r\n\x1a\n"
ROUNDING = "rounding"
"""The name of a series that says how much of another one rounding explains."""


@dataclass(frozen=True)
class Sentence:
    """A line of text: the first one is the summary of the result, the others are remarks."""

    text: str

    def __post_init__(self) -> None:
        _require(isinstance(self.text, str), "the text of a sentence must be a string")


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under a header.

    >>> Table(["path", "error"], [["conv1", 0.5], ["fc", None]]).records()[0]
    {'path': 'conv1', 'error': 0.5}
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str = "Table"

    def __post_init__(self) -> None:
        _require(_are_texts([*self.header, self.title]), "the header of a table must be strings")
        plain = (str, int, float, type(None))
        fits = all(len(row) == len(self.header) and all(isinstance(cell, plain) for cell in row) for row in self.rows)
        _require(fits, f"each row of a table must have {len(self.header)} numbers or strings")

    @classmethod
    def of(cls, records: Sequence[Mapping[str, Any]], title: str = "Table") -> Table:
        """A table with a row for each record, without empty columns; other things than numbers and strings are text."""
        header = list(dict.fromkeys(name for record in records for name in record if record[name] is not None))
        return cls(header, [[_cell(record.get(name)) for name in header] for record in records], title)

    def is_number(self, column: int) -> bool:
        """Whether a column has nothing but numbers."""
        return all(isinstance(row[column], (int, float, type(None))) for row in self.rows)

    def records(self) -> list[dict[str, Any]]:
        """One dict per row."""
        return [dict(zip(self.header, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Bars:
    """Numbers by layer, one series per name, such as a distance or an effect. `log` draws them by powers of ten.

    The series `ROUNDING` is grey.
    """

    layers: Sequence[str]
    values: Mapping[str, Sequence[float | None]]
    unit: str
    title: str = "By layer"
    log: bool = False

    def __post_init__(self) -> None:
        _require(_are_texts([*self.layers, *self.values, self.unit, self.title]), "the names of bars must be strings")
        lines = list(self.values.values())
        numbers = all(value is None or is_number(value) for line in lines for value in line)
        _require(numbers and all(len(line) == len(self.layers) for line in lines), "bars need one number per layer")


@dataclass(frozen=True, eq=False)
class Matrix:
    """One number for each pair of a row and a column, such as a similarity; NaN where there is none."""

    values: Tensor
    rows: Sequence[str]
    columns: Sequence[str]
    unit: str
    title: str = "Matrix"

    def __post_init__(self) -> None:
        _require(
            _are_texts([*self.rows, *self.columns, self.unit, self.title]), "the names of a matrix must be strings"
        )
        shape = tuple(getattr(self.values, "shape", ()))
        _require(shape == (len(self.rows), len(self.columns)), f"a matrix of shape {shape} does not fit its names")
        is_real = self.values.dtype.is_floating_point and self.values.element_size() > 1
        _require(is_real, f"a matrix must have real numbers, not {self.values.dtype}")


@dataclass(frozen=True, eq=False)
class Picture:
    """A drawing: the bytes of a PNG file, as a tensor."""

    png: Tensor
    title: str = "Figure"

    def __post_init__(self) -> None:
        shape = tuple(getattr(self.png, "shape", ()))
        is_png = len(shape) == 1 and self.png.element_size() == 1 and self._bytes().startswith(PNG)
        _require(is_png and isinstance(self.title, str), "a picture must be the bytes of a PNG file")

    @classmethod
    def of(cls, data: bytes) -> Picture:
        """A picture of a PNG file's bytes."""
        import torch

        return cls(torch.frombuffer(bytearray(data), dtype=torch.uint8))

    def address(self) -> str:
        """The picture as the address of an image in a page."""
        return f"data:image/png;base64,{b64encode(self._bytes()).decode()}"

    def _bytes(self) -> bytes:
        return self.png.numpy().tobytes()


Part = Sentence | Table | Bars | Matrix | Picture | Report
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Sentence, Table, Bars, Matrix, Picture, Report)}


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
