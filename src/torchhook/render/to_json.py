"""The report as strict JSON, according to ``report.schema.json``; reading it back gives an equal report.

JSON has no NaN and no infinity, so these are written as the strings "NaN", "Infinity" and "-Infinity". In the evidence
of a finding they stay strings when they are read, because evidence may contain such strings itself.
"""

from __future__ import annotations

import json as codec
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchhook.core.findings import Report
from torchhook.core.text import escaped
from torchhook.core.untrusted import json_of
from torchhook.render.words import spelled

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = {"site", "kind", "module", "role"}  # strings of a layer: a module may be called NaN


def json(report: Report) -> str:
    """A report as JSON.

    >>> codec.loads(json(Report(model="Net", losses={0: math.nan})))["losses"]
    [[0, 'NaN']]
    """
    return as_json(report.to_dict())


def as_json(value: Any) -> str:
    """Any value as strict JSON, which can be encoded and printed whatever its strings contain.

    >>> as_json({"loss": math.inf})
    '{\\n  "loss": "Infinity"\\n}\\n'
    >>> print(as_json(chr(0xd800) + chr(0x9b)).strip())
    "\\ud800\\u009b"
    """
    return escaped(codec.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False)) + "\n"


def from_json(text: str) -> Report:
    """The report that was written as this JSON.

    >>> from_json(json(Report(model="Net", losses={0: math.inf}))).losses
    {0: inf}
    """
    report = Report.from_dict(json_of(text))
    layers = ({key: v if key in _WORDS else _revived(v) for key, v in layer.items()} for layer in report.layers)
    gradients = {step: tuple(map(_revived, sizes)) for step, sizes in report.gradients.items()}
    return replace(report, layers=tuple(layers), losses=_revived(report.losses), gradients=gradients)


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it. Rules of users may put numpy and torch scalars into the evidence."""
    if isinstance(value, float):
        return value if math.isfinite(value) else spelled(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)


def _revived(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _revived(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revived(item) for item in value]
    return _NUMBERS.get(value, value) if isinstance(value, str) else value
