"""The settings of a project: ``[tool.torchhook]`` in its pyproject.toml, as for a linter.

[tool.torchhook]
select = ["TH1", "TH2"]
ignore = ["TH202"]
fail-on = "warning"

[tool.torchhook.per-module-ignores]
"head.*" = ["TH201"]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from torchhook.core.errors import FileError

SEVERITIES = ("info", "warning", "error")


@dataclass(frozen=True)
class Config:
    """Which rules to apply, and from which severity on they fail."""

    select: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()
    fail_on: str = "error"
    per_module: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def find(cls, start: Path) -> Config:
        """The settings of the nearest pyproject.toml with a table ``[tool.torchhook]``, upwards from `start`."""
        for folder in (start, *start.parents):
            file = folder / "pyproject.toml"
            table = _table(file) if file.is_file() else None
            if table is not None:
                return cls.of(table, f"{file}: [tool.torchhook]")
        return cls()

    @classmethod
    def of(cls, table: Any, where: str = "[tool.torchhook]") -> Config:
        """The settings in a table.

        >>> Config.of({"ignore": ["TH202"], "fail-on": "warning"}).ignore
        ('TH202',)
        >>> Config.of({"fail_on": "warning"})
        Traceback (most recent call last):
        ValueError: [tool.torchhook]: there is no setting 'fail_on'; did you mean 'fail-on'?
        """
        if not isinstance(table, dict):
            raise ValueError(f"{where} must be a table, not {table!r}")
        for key, value in table.items():
            if key not in _KEYS:
                near = get_close_matches(key, _KEYS, 1)
                known = f"did you mean {near[0]!r}?" if near else f"known settings are {', '.join(_KEYS)}"
                raise ValueError(f"{where}: there is no setting {key!r}; {known}")
            expected, is_valid = _KEYS[key]
            if not is_valid(value):
                raise ValueError(f"{where}: {key} must be {expected}, not {value!r}")
        return cls(
            select=tuple(table["select"]) if "select" in table else None,
            ignore=tuple(table.get("ignore", ())),
            fail_on=table.get("fail-on", "error"),
            per_module=dict(table.get("per-module-ignores", {})),
        )

    def overruled(self, select: Sequence[str] = (), ignore: Sequence[str] = (), fail_on: str | None = None) -> Config:
        """The settings with arguments of one call: `select` replaces the selection, `ignore` adds to the ignored.

        >>> Config(ignore=("TH2",)).overruled(["TH201"]).arguments()["ignore"]
        ()
        """
        base = replace(self, select=tuple(select), ignore=()) if select else self
        return replace(base, ignore=(*base.ignore, *ignore), fail_on=fail_on or self.fail_on)

    def arguments(self) -> dict[str, Any]:
        """The settings as keyword arguments of `diagnose` and `check`."""
        rules = {"rules": self.select, "ignore": self.ignore, "per_module": self.per_module}
        return {**rules, "fail_on": self.fail_on}


def _table(file: Path) -> Any:
    """The table ``[tool.torchhook]`` of a pyproject.toml; None if there is none."""
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (ValueError, RecursionError) as error:
        raise FileError(f"{file} is not valid TOML: {error}") from error
    return tool.get("torchhook") if isinstance(tool, dict) else None


def _are_codes(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(code, str) for code in value)


_KEYS = {
    "select": ("a list of codes", _are_codes),
    "ignore": ("a list of codes", _are_codes),
    "fail-on": ("info, warning or error", lambda value: value in SEVERITIES),
    "per-module-ignores": (
        "a table of lists of codes",
        lambda value: isinstance(value, dict) and all(map(_are_codes, value.values())),
    ),
}
