"""A `Finding` is one fact about one place in a model; a `Report` is an ordered collection of findings.

Both are plain data and do not need torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from torchhook.core.cards import boxed, card, text
from torchhook.core.tabular import frame
from torchhook.core.untrusted import is_number

SCHEMA = 1
"""The version of the dictionaries that `Report.to_dict` returns; it is raised when older readers would fail."""

_WORDS = ("NaN", "Infinity", "-Infinity")  # which JSON has no numbers for
_TEXTS = ("site", "kind", "module", "role")  # of a layer: the rest are numbers


class Severity(str, Enum):
    """How bad a finding is: an ``info`` is good to know, a ``warning`` worth a look, an ``error`` means broken.

    >>> Severity.ERROR == "error", Severity("warning") >= Severity.INFO
    (True, True)
    """

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0, 1 or 2."""
        return list(Severity).index(self)

    def __ge__(self, other: str) -> bool:
        return self.rank >= Severity(other).rank

    def __gt__(self, other: str) -> bool:
        return self.rank > Severity(other).rank

    def __le__(self, other: str) -> bool:
        return self.rank <= Severity(other).rank

    def __lt__(self, other: str) -> bool:
        return self.rank < Severity(other).rank

    __str__ = str.__str__


@dataclass(frozen=True)
class Trial:
    """A repair that was tried on a copy: what was changed, and the loss after some steps without and with it.

    >>> print(Trial("inputs standardised", without=2.28, repaired=0.31, steps=100))
    tried: inputs standardised → loss 0.31 instead of 2.28 after 100 steps
    """

    change: str
    without: float
    repaired: float
    steps: int
    helped: bool = True

    def to_dict(self) -> dict[str, Any]:
        """The trial as numbers and strings; a loss that is not finite, which JSON does not have, as a string."""
        return {name: json_value(value) for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """The trial that `to_dict` turned into this dictionary."""
        _require(data, change=str, steps=int, helped=bool)
        losses = {name: float(data[name]) for name in ("without", "repaired")}
        return cls(**{**data, **losses})

    def __str__(self) -> str:
        end = "" if self.helped else ": no clear difference"
        losses = f"loss {self.repaired:.3g} instead of {self.without:.3g}"
        return f"tried: {self.change} → {losses} after {self.steps} steps{end}"


@dataclass(frozen=True)
class Finding:
    """One fact about a model: the code of the rule, how bad it is, what happened, where, since which step, what to do.

    `site` is the path of a module or parameter, empty for the whole model. `evidence` has the numbers behind the
    finding. `affected` are the findings that this one explains: sixty layers of NaN are one finding with fifty-nine
    affected. `tried` is the repair that `diagnose` tried on its copy, if there is one.

    >>> finding = Finding("TH201", Severity.ERROR, "61% of the units never fire", site="layer3.1.relu", step=240)
    >>> print(finding)
    TH201 error: layer3.1.relu, step 240: 61% of the units never fire
    """

    code: str
    severity: Severity
    message: str
    site: str = ""
    step: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    hint: str = ""
    affected: tuple[Finding, ...] = ()
    tried: Trial | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "severity", Severity(self.severity))

    @property
    def module(self) -> str:
        """The class of the module at the site, if that is known."""
        return str(self.evidence.get("module", ""))

    @property
    def place(self) -> str:
        """The site with the class of its module.

        >>> Finding("TH201", "error", "61% never fire", "3", evidence={"module": "ReLU"}).place
        '3 (ReLU)'
        """
        return f"{self.site or 'the model'}{f' ({self.module})' if self.module else ''}"

    @property
    def where(self) -> str:
        """The place and the step, in words."""
        return self.place if self.step is None else f"{self.place}, step {self.step}"

    @property
    def advice(self) -> list[str]:
        """What to do, and what came of trying it: a line for each of the two that there is.

        >>> Finding("TH603", "warning", "the loss jumps", hint="Lower the rate.").advice
        ['Lower the rate.']
        """
        return [str(part) for part in (self.hint, self.tried) if part]

    def to_dict(self) -> dict[str, Any]:
        """The finding as numbers, strings, lists and dicts."""
        own = {name: getattr(self, name) for name in ("code", "message", "site", "step", "hint")}
        return {
            **own,
            "severity": str(self.severity),
            "evidence": dict(self.evidence),
            "affected": [finding.to_dict() for finding in self.affected],
            "tried": None if self.tried is None else self.tried.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that `to_dict` turned into this dictionary."""
        _require(data, code=str, message=str, site=str, step=(int, type(None)), evidence=Mapping, hint=str)
        tried = data.get("tried")  # reports from before repairs were tried have none
        parts = {
            "affected": tuple(map(cls.from_dict, data["affected"])),
            "tried": None if tried is None else Trial.from_dict(tried),
        }
        return cls(**{**data, **parts})

    def __str__(self) -> str:
        return f"{self.code} {self.severity}: {self.where}: {self.message}"


@dataclass(frozen=True)
class Report:
    """What was found in a model, worst first, each root cause with its consequences.

    `checked` has the codes of the rules that were applied, `skipped` those that were not, each with the reason.
    `layers` has the numbers of each layer and parameter behind the plots, in the order of execution, measured from the
    first to the last step of `span`; `losses` are by step. `gradients` has the sizes of the gradients at some
    steps, each in the order of `layers`. `about` says where the report comes from, as far as that is known: ``run``,
    ``state``, ``started``, ``command``, ``versions`` and ``device``.

    >>> report = Report((Finding("TH201", "error", "61% of the units never fire", site="relu"),), model="Net")
    >>> report.ok, report.exit_code, report.passing("info").ok
    (False, 1, False)
    >>> print(report)
    Net: 1 error
    TH201 error: relu: 61% of the units never fire
    """

    findings: tuple[Finding, ...] = ()
    model: str = "model"
    fail_on: Severity = Severity.ERROR
    checked: tuple[str, ...] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[Mapping[str, Any], ...] = ()
    losses: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    span: tuple[int, int] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    gradients: Mapping[int, Sequence[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fail_on", Severity(self.fail_on))

    @property
    def ok(self) -> bool:
        """Whether no finding is as bad as `fail_on`, or worse."""
        return not any(finding.severity >= self.fail_on for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """The exit code for a program: 0 if `ok`, otherwise 1."""
        return 0 if self.ok else 1

    def passing(self, fail_on: str) -> Report:
        """The same report with another `fail_on`."""
        return replace(self, fail_on=Severity(fail_on))

    def count(self, severity: str) -> int:
        """How many findings have this severity."""
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def headline(self) -> str:
        """The model and how many findings there are of each severity, in one line."""
        counts = [(self.count(severity), severity) for severity in reversed(Severity)]
        parts = [f"{n} {severity}{'s' if n > 1 and severity != 'info' else ''}" for n, severity in counts if n]
        return f"{self.model}: {', '.join(parts) or 'nothing found'}"

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, strings, lists and dicts, which `from_dict` reads back and `render.json` writes.

        >>> Report.from_dict(Report(model="Net").to_dict()) == Report(model="Net")
        True
        """
        return {
            "schema": SCHEMA,
            "model": self.model,
            "ok": self.ok,
            "fail_on": str(self.fail_on),
            "findings": [finding.to_dict() for finding in self.findings],
            "checked": list(self.checked),
            "skipped": dict(self.skipped),
            "layers": [dict(layer) for layer in self.layers],
            "losses": [[step, loss] for step, loss in self.losses.items()],
            "notes": list(self.notes),
            "span": None if self.span is None else list(self.span),
            "about": dict(self.about),
            "gradients": [[step, list(sizes)] for step, sizes in self.gradients.items()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that `to_dict` turned into this dictionary."""
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"cannot read a report of schema {data.get('schema')!r}: this torchhook reads schema {SCHEMA}"
            )
        span = data.get("span")
        _require(data, model=str, skipped=Mapping, checked=list, layers=list, losses=list, notes=list)
        _require({"span": span, "about": {}, **data}, span=(list, type(None)), about=Mapping)
        return cls(
            findings=tuple(map(Finding.from_dict, data["findings"])),
            model=data["model"],
            fail_on=Severity(data["fail_on"]),
            checked=tuple(map(str, data["checked"])),
            skipped={str(code): str(reason) for code, reason in data["skipped"].items()},
            layers=tuple(map(_layer, data["layers"])),
            losses={_whole(step): _number(loss) for step, loss in data["losses"]},
            notes=tuple(map(str, data["notes"])),
            span=None if span is None else (_whole(span[0]), _whole(span[1])),
            about=dict(data.get("about", {})),
            gradients={_whole(step): tuple(map(_number, sizes)) for step, sizes in data.get("gradients", [])},
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file ending in ``.th``, like any result; `torchhook.render.save` has other formats."""
        from torchhook.core.result import write

        write(type(self).__name__, self._parts(), path)

    def _parts(self) -> list[Any]:
        """What pages and files show of it: a report is a part of its own kind."""
        return [self]

    def table(self, kind: str | None = None) -> Any:
        """The findings: a DataFrame if pandas is installed, else a list of dicts; `kind` chooses, as elsewhere."""
        names = ("code", "severity", "step", "message", "hint")
        records = [{"path": one.site, **{name: getattr(one, name) for name in names}} for one in self.findings]
        return frame(records, kind)

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(_as_text, self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return boxed(f"<p><b>{text(self.headline)}</b></p>{''.join(map(card, self.findings))}")


def json_value(value: Any) -> Any:
    """A value for a report; NaN and Inf, which JSON does not have, as strings.

    >>> json_value(float("inf")), json_value(2.0)
    ('Infinity', 2.0)
    """
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, dict):
        return {name: json_value(item) for name, item in value.items()}
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return dict(zip(("nan", "inf", "-inf"), _WORDS, strict=True))[str(value)] if is_odd else value


def _require(data: Mapping[str, Any], **kinds: type | tuple[type, ...]) -> None:
    """Raise if a value is not of its kind: a file may contain anything."""
    for name, kind in kinds.items():
        if not isinstance(data.get(name), kind):
            raise ValueError(f"{name} must not be {data.get(name)!r:.80}")


def _layer(data: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a layer, if they are as pages draw them."""
    _require(data, site=str, kind=str)
    _require({"module": None, "role": None, **data}, module=(str, type(None)), role=(str, type(None)))
    return {name: value if name in _TEXTS else _number(value) for name, value in data.items()}


def _number(value: Any) -> Any:
    """A number, or nothing, or the word for a number that JSON does not have."""
    if value is None or value in _WORDS or is_number(value):
        return value
    raise ValueError(f"a number must not be {value!r:.80}")


def _whole(value: Any) -> int:
    if not isinstance(value, int) or not is_number(value):
        raise ValueError(f"a step must not be {value!r:.80}")
    return value


def _as_text(finding: Finding) -> str:
    """A finding with what it explains, its hint and what was tried, in a few lines."""
    lines = [str(finding)]
    if finding.affected:
        lines.append(f"  explains {_consequences(finding)}")
    return "\n".join([*lines, *(f"  {line}" for line in finding.advice)])


def _consequences(finding: Finding) -> str:
    """The affected findings in one line, the first few by name; of several at the same place, one."""
    names = list(dict.fromkeys(f"{other.code} at {other.place}" for other in finding.affected))
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
