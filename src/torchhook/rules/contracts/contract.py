"""A `Contract`: a property that a correct model of its kind has."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, NamedTuple

from torchhook.core.findings import Severity
from torchhook.rules.contracts.case import Agreement

OWN = "TV199"
"""The code of contracts that a user has written."""


class Breach(NamedTuple):
    """A contract that is broken: what is wrong, and at which module or parameter.

    `severity` and `hint` are those of the contract unless they are given.
    """

    message: str
    site: str = ""
    severity: str | None = None
    hint: str | None = None
    evidence: Mapping[str, Any] = MappingProxyType({})


class Skip(NamedTuple):
    """The contract was not checked, and why."""

    reason: str


class Note(NamedTuple):
    """A remark about what was checked: mostly a part that was not, and why."""

    text: str


Check = Callable[..., Iterable["Agreement | Breach | Skip | Note"]]
"""Takes a `Case`, and options by keyword; yields runs that should agree, what is broken, and what was not checked."""


@dataclass(frozen=True)
class Contract:
    """A property that a correct model of its kind has, mostly that two runs of it agree.

    Called with options, it returns the same contract with those: ``contracts.modes(compile="inductor")``.
    """

    code: str
    name: str
    check: Check
    hint: str = ""
    severity: Severity = Severity.ERROR
    folds: bool = True  # whether all that breaks it has one cause
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **options: Any) -> Contract:
        """The same contract with other options."""
        _, *names = inspect.signature(self.check).parameters
        given = {**dict(zip(names, args, strict=False)), **options}
        if len(args) > len(names) or not given.keys() <= set(names):
            raise TypeError(f"contracts.{self.name} takes {', '.join(names) or 'no options'}, not {[*args, *options]}")
        return replace(self, options={**self.options, **given})

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"contracts.{self.name}{f'({given})' if given else ''}"


CONTRACTS: dict[str, Contract] = {}
"""All contracts by name. They are checked in the order of their codes."""


def contract(code: str, hint: str, severity: str = "error", *, folds: bool = True) -> Callable[[Check], Contract]:
    """Make a function the check of a contract of its name."""

    def made(check: Check) -> Contract:
        found = CONTRACTS[check.__name__] = Contract(code, check.__name__, check, hint, Severity(severity), folds)
        return found

    return made


def chosen(contracts: Any) -> list[Contract]:
    """The contracts that are named, by name, as objects, or as functions of the user's own; all of them for None."""
    if contracts is None:
        return sorted(CONTRACTS.values(), key=lambda one: one.code)
    one = isinstance(contracts, str) or not isinstance(contracts, Iterable)
    return [_one(choice) for choice in ([contracts] if one else contracts)]


def _one(choice: Any) -> Contract:
    if isinstance(choice, Contract):
        return choice
    if isinstance(choice, str):
        if choice not in CONTRACTS:
            near = get_close_matches(choice, CONTRACTS, 1)
            known = f"did you mean {near[0]}?" if near else f"there are {', '.join(CONTRACTS)}"
            raise ValueError(f"contracts: there is no contract {choice!r}; {known}")
        return CONTRACTS[choice]
    if not callable(choice):
        raise TypeError(f"contracts must be names, contracts, or functions of a case, not {choice!r:.80}")
    return Contract(OWN, getattr(choice, "__name__", type(choice).__name__), choice)
