"""The contract for programs: strict JSON by ``report.schema.json``, read back as the same report.

JSON has no NaN and no infinity: such numbers are the strings "NaN", "Infinity" and "-Infinity". In the evidence of a
finding they stay strings, for there may be others.
"""

from __future__ import annotations

import json as codec
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torchhook.core.findings import Report
from torchhook.render.words import spelled

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_WORDS = {"site", "kind", "module", "role"}  # of a layer: a module may be called NaN


def json(report: Report) -> str:
    """A report for programs.

    >>> codec.loads(json(Report(model="Net", losses={0: math.nan})))["losses"]
    [[0, 'NaN']]
    """
    return codec.dumps(_plain(report.to_dict()), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(text: str) -> Report:
    """The report that gave this JSON.

    >>> from_json(json(Report(model="Net", losses={0: math.inf}))).losses
    {0: inf}
    """
    report = Report.from_dict(codec.loads(text))
    layers = ({key: v if key in _WORDS else _revived(v) for key, v in layer.items()} for layer in report.layers)
    return replace(report, layers=tuple(layers), losses=_revived(report.losses))


def _plain(value: Any) -> Any:
    """What JSON can say. Anybody writes rules: a scalar of numpy or torch in the evidence is no reason to fail."""
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
