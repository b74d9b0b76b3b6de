"""What a project wants of the rules: ``[tool.torchhook]`` of its pyproject.toml, in the shape that linters have.

[tool.torchhook]
select = ["TH1", "TH2"]
ignore = ["TH202"]
fail-on = "warning"

[tool.torchhook.per-module-ignores]
"head.*" = ["TH201"]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Config:
    """Which rules to apply, and how bad a finding may be."""

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    per_module: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def find(cls, start: Path) -> Config:
        """That of the nearest pyproject.toml with a table for us, upwards from `start`."""
        for folder in (start, *start.parents):
            file = folder / "pyproject.toml"
            if file.is_file():
                table = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}).get("torchhook")
                if table is not None:
                    return cls.of(table, str(file))
        return cls()

    @classmethod
    def of(cls, table: dict[str, Any], where: str = "[tool.torchhook]") -> Config:
        """The settings of a table.

        >>> Config.of({"ignore": ["TH202"], "fail-on": "warning"}).fail_on
        'warning'
        """
        unknown = sorted(set(table) - set(_KEYS))
        if unknown:
            raise ValueError(f"{where}: there is no setting {unknown[0]!r}; there are {', '.join(_KEYS)}")
        for key in ("select", "ignore"):
            if not isinstance(table.get(key, []), list):
                raise ValueError(f"{where}: {key} must be a list of codes, not {table[key]!r}")
        return cls(
            select=tuple(table["select"]) if "select" in table else None,
            ignore=tuple(table.get("ignore", ())),
            fail_on=table.get("fail-on", "error"),
            per_module=dict(table.get("per-module-ignores", {})),
        )


_KEYS = ("select", "ignore", "fail-on", "per-module-ignores")
