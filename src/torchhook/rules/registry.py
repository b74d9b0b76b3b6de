"""The registered rules by code, and selecting among them as in a linter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TypeAlias, TypeVar

from torchhook.rules.rule import Rule

RULES: dict[str, Rule] = {}
"""Every registered rule, by code."""

Choice: TypeAlias = "str | Rule"
"""A code, the beginning of one (``"TH2"``), a name, or a rule."""

_R = TypeVar("_R", bound=type[Rule])


def register(rule: _R) -> _R:
    """Register a rule under its code, so that it is applied by default; use it as a decorator.

    >>> @register
    ... class Never(Rule):
    ...     '''Nothing.'''
    ...     code, name = "XX999", "never"
    ...     def find(self, history):
    ...         return iter(())
    >>> RULES.pop("XX999")
    <XX999 never>
    """
    if not re.fullmatch(r"[A-Z]+\d+", getattr(rule, "code", "")):
        raise ValueError(f"{rule.__name__}.code must be capital letters and a number, such as 'MY001'")
    if rule.code in RULES:
        raise ValueError(f"the code {rule.code} is already taken by {RULES[rule.code].name}")
    RULES[rule.code] = rule()
    return rule


def chosen(select: Iterable[Choice] | None = None, ignore: Sequence[Choice] = ()) -> list[Rule]:
    """The rules that `select` names (by default all), without those that `ignore` names.

    >>> chosen(["TH2", "loss-spike"], ignore=["TH202"])
    [<TH201 dead-units>, <TH203 saturated>, <TH204 constant-output>, <TH602 loss-spike>]
    """
    wanted = RULES.values() if select is None else [rule for choice in _listed(select) for rule in named(choice)]
    without = [rule for choice in _listed(ignore) for rule in named(choice)]
    return sorted(dict.fromkeys(rule for rule in wanted if rule not in without), key=lambda rule: rule.code)


def named(choice: Choice) -> list[Rule]:
    """The rules with this code, beginning of a code, or name."""
    if isinstance(choice, Rule):
        return [choice]
    if not isinstance(choice, str):
        raise TypeError(f"rules must be codes such as 'TH201', names, or Rule objects, not {choice!r}")
    found = [rule for rule in RULES.values() if choice and (rule.code.startswith(choice) or rule.name == choice)]
    if not found:
        known = [*RULES, *(rule.name for rule in RULES.values())]
        near = get_close_matches(choice, known, 3) or list(RULES)[:3]
        raise ValueError(f"there is no rule {choice!r}; did you mean {', '.join(near)}? `torchhook rules` lists them")
    return found


def _listed(choices: Iterable[Choice]) -> Iterable[Choice]:
    return [choices] if isinstance(choices, (str, Rule)) else choices
