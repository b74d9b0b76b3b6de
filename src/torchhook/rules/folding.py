"""One root cause: consequences are folded under what explains them, in the order of steps and of execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchhook.findings import Finding, Severity
from torchhook.rules.rule import Phase, Rule


def folded(found: Mapping[Rule, Sequence[Finding]], order: Mapping[str, int]) -> tuple[Finding, ...]:
    """The root causes among what rules found, worst first, with all that they explain as their `affected`."""
    roots = {rule: _root(rule, findings, order) for rule, findings in found.items() if findings}
    while (pair := _explained(roots, order)) is not None:
        cause, consequence = pair
        roots[cause] = _under(roots[cause], roots.pop(consequence))
    return tuple(sorted(roots.values(), key=_rank))


def _root(rule: Rule, findings: Sequence[Finding], order: Mapping[str, int]) -> Finding:
    """The first of one rule's findings, with the others under it."""

    def key(finding: Finding) -> tuple[int, int, int]:
        place, _ = _place(finding, order)
        step = -1 if finding.step is None else finding.step
        return -finding.severity.rank, step, -place if rule.backward else place

    first, *others = sorted(findings, key=key)
    return replace(first, affected=(*first.affected, *others))


def _explained(roots: Mapping[Rule, Finding], order: Mapping[str, int]) -> tuple[Rule, Rule] | None:
    """A cause and its consequence, if there still are any; the earliest causes come last, to take all with them."""
    for consequence, late in sorted(roots.items(), key=lambda item: _step(item[1]), reverse=True):
        for cause, early in roots.items():
            if not _may_cause(cause, early, consequence, late):
                continue
            is_mutual = _may_cause(consequence, late, cause, early)
            if not is_mutual or _place(early, order) < _place(late, order):  # what runs first is the cause
                return cause, consequence
    return None


def _may_cause(cause: Rule, early: Finding, consequence: Rule, late: Finding) -> bool:
    """Whether one finding may explain another: by its rule, its steps, and as much as it is a warning itself."""
    if cause is consequence or not consequence.code.startswith(cause.explains):
        return False
    if early.severity == Severity.INFO and late.severity > Severity.INFO:
        return False
    first, second = _when(cause, early), _when(consequence, late)
    return first is None or second is None or first <= second


def _when(rule: Rule, finding: Finding) -> tuple[int, int] | None:
    """The step and phase of a finding, if that is known; what a model at rest shows was there before the first."""
    if finding.step is None:
        return (-1, rule.phase) if rule.phase == Phase.REST else None
    return finding.step, rule.phase


def _place(finding: Finding, order: Mapping[str, int]) -> tuple[int, str]:
    """Where in the order of execution a finding is: that of its site, or of the first thing inside of it."""
    if finding.site in order:
        return order[finding.site], finding.code
    inside = [place for path, place in order.items() if path.startswith(f"{finding.site}.")]
    return min(inside, default=len(order)) if finding.site else -1, finding.code


def _under(cause: Finding, consequence: Finding) -> Finding:
    worst = max(cause.severity, consequence.severity, key=lambda severity: severity.rank)
    alone = replace(consequence, affected=())
    return replace(cause, severity=worst, affected=(*cause.affected, alone, *consequence.affected))


def _step(finding: Finding) -> int:
    return -1 if finding.step is None else finding.step


def _rank(finding: Finding) -> tuple[int, int, str]:
    return -finding.severity.rank, _step(finding), finding.code
