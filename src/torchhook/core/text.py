"""Plain text output: sizes, shapes, aligned tables, warnings."""

from __future__ import annotations

import html
import linecache
import re
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

# Control characters (escape sequences change a terminal's colours, XML forbids most), marks that change the text
# direction, lone surrogates, and two code points that are not characters.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """`text` without characters that would harm a page, a terminal or an XML file.

    >>> printable("fc" + chr(27) + "[31m")
    'fc[31m'
    """
    return _UNPRINTABLE.sub("", text)


def escaped(text: str) -> str:
    """`text` with an escape for each character that `printable` leaves out.

    >>> escaped("fc" + chr(27) + "[31m")
    'fc\\\\u001b[31m'
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def message_of(error: BaseException) -> str:
    """The message of an exception, whose class may be anyone's.

    >>> message_of(ValueError("no data"))
    'no data'
    """
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"  # as Python says


def in_units(size: float) -> str:
    """A number of bytes with its unit.

    >>> in_units(1536), in_units(80)
    ('1.5 KiB', '80 B')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def size_of(text: str) -> int:
    """A number of bytes from its text, the inverse of `in_units`.

    >>> size_of("256MiB"), size_of("1.5 KiB"), size_of("80")
    (268435456, 1536, 80)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])i)?B?\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 256MiB, or a number of bytes")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " "))


def shape_of(value: Any) -> str:
    """The shape of a tensor, or of the tensors in a container, in one short line.

    >>> import torch
    >>> shape_of((torch.ones(2, 3), {"h": torch.ones(4)}, None))
    '(2×3, {h: 4}, None)'
    """
    from torch import Tensor  # reports, which use the rest of this file, need no torch

    if isinstance(value, Tensor):
        return "nested" if value.is_nested else "×".join(map(str, value.shape)) or "scalar"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shape_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(shape_of, value)) + ")"
    return "None" if value is None else type(value).__name__


def first_few(names: Sequence[str]) -> str:
    """The first three of some names, and how many more there are.

    >>> first_few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Rows under a header in aligned columns, numbers to the right.

    >>> print(table(["site", "calls"], [["conv1", 1], ["fc", 12]]))
    site   calls
    conv1      1
    fc        12
    """
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [bool(rows) and isinstance(cell, (int, float)) for cell in (rows[0] if rows else header)]
    lines = [
        "  ".join(cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True))
        for row in [list(header), *cells]
    ]
    return "\n".join(line.rstrip() for line in lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """The same as HTML for a notebook; every cell is escaped."""

    def line(tag: str, row: Sequence[Any]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    table = f"<table><thead>{line('th', header)}</thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def warn(message: str) -> None:
    """Warn, pointing at the user's line that led here through this package and torch."""
    warnings.warn(message, stacklevel=user_level())


def user_level() -> int:
    """The `stacklevel` for a warning of the caller that points at the user's line, beyond this package and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_passed(frame):
        level, frame = level + 1, frame.f_back
    return level


def user_line() -> str:
    """The user's line that led here through this package and torch: ``net.py:41: x = self.fc(x)``; empty if unknown."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    source = linecache.getline(file, number, frame.f_globals).strip()
    return f"{file}:{number}{f': {source:.120}' if source else ''}"


def _is_passed(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).split(".")[0] in ("torch", "torchhook", "contextlib")
