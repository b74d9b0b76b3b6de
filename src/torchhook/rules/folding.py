"""One root cause: consequences are folded under what explains them, in the order of steps and of execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchhook.findings import Finding
from torchhook.rules.rule import Rule


def folded(found: Mapping[Rule, Sequence[Finding]], order: Mapping[str, int]) -> tuple[Finding, ...]:
    """The root causes among what rules found, worst first, with all that they explain as their `affected`."""
    roots = {rule: _root(rule, findings, order) for rule, findings in found.items() if findings}
    while (pair := _explained(roots)) is not None:
        cause, consequence = pair
        roots[cause] = _under(roots[cause], roots.pop(consequence))
    return tuple(sorted(roots.values(), key=_rank))


def _root(rule: Rule, findings: Sequence[Finding], order: Mapping[str, int]) -> Finding:
    """The first of one rule's findings, with the others under it."""

    def key(finding: Finding) -> tuple[int, int, int]:
        place = order.get(finding.site, -1 if not finding.site else len(order))
        step = -1 if finding.step is None else finding.step
        return -finding.severity.rank, step, -place if rule.backward else place

    first, *others = sorted(findings, key=key)
    return replace(first, affected=(*first.affected, *others))


def _explained(roots: Mapping[Rule, Finding]) -> tuple[Rule, Rule] | None:
    """A cause and its consequence, if there still are any; the earliest causes come last, to take all with them."""
    for consequence, late in sorted(roots.items(), key=lambda item: _step(item[1]), reverse=True):
        for cause, early in roots.items():
            if not (_may_cause(cause, consequence) and _precedes(early, late)):
                continue
            is_mutual = _may_cause(consequence, cause) and _precedes(late, early)
            if not is_mutual or cause.code < consequence.code:
                return cause, consequence
    return None


def _may_cause(cause: Rule, consequence: Rule) -> bool:
    return cause is not consequence and consequence.code.startswith(cause.explains)


def _precedes(early: Finding, late: Finding) -> bool:
    """Whether one can have come before the other, as far as their steps are known."""
    return early.step is None or late.step is None or early.step <= late.step


def _under(cause: Finding, consequence: Finding) -> Finding:
    worst = max(cause.severity, consequence.severity, key=lambda severity: severity.rank)
    alone = replace(consequence, affected=())
    return replace(cause, severity=worst, affected=(*cause.affected, alone, *consequence.affected))


def _step(finding: Finding) -> int:
    return -1 if finding.step is None else finding.step


def _rank(finding: Finding) -> tuple[int, int, str]:
    return -finding.severity.rank, _step(finding), finding.code
