"""Folds findings under their root cause, by the order of steps and of execution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torchhook.core.findings import Finding, Severity
from torchhook.rules.rule import Phase, Rule


def folded(found: Mapping[Rule, Sequence[Finding]], order: Mapping[str, int]) -> tuple[Finding, ...]:
    """The root causes among the findings, worst first; `affected` of each has the findings that it explains."""
    first = {rule: _root(rule, findings, order) for rule, findings in found.items() if findings}
    causes = {rule: [cause for cause in first if _is_cause(cause, rule, first, order)] for rule in first}
    left, roots = set(first), []
    while left:
        reached = {rule: _reached(rule, causes, left) for rule in left}
        # A source is caused only by rules that it causes itself: rules may cause each other in a circle.
        sources = [rule for rule in left if all(cause in reached[rule] for cause in left if rule in reached[cause])]
        root = min(sources, key=lambda rule: _rank(first[rule]))
        explained = reached[root]
        left -= {root, *explained}
        roots.append(_over(first[root], [first[rule] for rule in explained]))
    return tuple(sorted(roots, key=_rank))


def _reached(root: Rule, causes: Mapping[Rule, Sequence[Rule]], left: set[Rule]) -> list[Rule]:
    """The rules of `left` that `root` explains, directly or through others, ordered by code."""
    found = {root}
    while more := {rule for rule in left - found if found & set(causes[rule])}:
        found |= more
    return sorted(found - {root}, key=lambda rule: rule.code)


def _root(rule: Rule, findings: Sequence[Finding], order: Mapping[str, int]) -> Finding:
    """The first of one rule's findings, with the others under it."""

    def key(finding: Finding) -> tuple[int, int, int]:
        place, _ = _place(finding, order)
        return -finding.severity.rank, _step(finding), -place if rule.backward else place

    first, *others = sorted(findings, key=key)
    return replace(first, affected=(*first.affected, *others))


def _is_cause(cause: Rule, rule: Rule, first: Mapping[Rule, Finding], order: Mapping[str, int]) -> bool:
    """Whether one rule's finding explains another's; of two that may explain each other, the one that runs first."""
    early, late = first[cause], first[rule]
    if not _may_cause(cause, early, rule, late):
        return False
    return not _may_cause(rule, late, cause, early) or _place(early, order) < _place(late, order)


def _may_cause(cause: Rule, early: Finding, consequence: Rule, late: Finding) -> bool:
    """Whether one finding may explain another, by its rule and its step; an info never explains anything worse."""
    if cause is consequence:
        return False
    if _share_a_repair(cause, early, consequence, late):
        return True
    if not consequence.code.startswith(cause.causes(early)):
        return False
    was_info = early.severity == Severity.INFO and early.tried is None  # a trial may have lowered it
    if was_info and late.severity > Severity.INFO:
        return False
    first, second = _when(cause, early), _when(consequence, late)
    if first is None and second is not None and second[0] < 0:  # before the training: no family explains that
        return consequence.code in cause.causes(early)
    return first is None or second is None or first <= second


def _share_a_repair(cause: Rule, early: Finding, consequence: Rule, late: Finding) -> bool:
    """Whether the same repair helps both, and it repairs what the first rule is about."""
    if early.tried is None or late.tried is None or not early.tried.helped:
        return False
    fault = early.evidence.get("cause")
    return early.tried == late.tried and fault == cause.cause != consequence.cause


def _when(rule: Rule, finding: Finding) -> tuple[int, int] | None:
    """The step and phase of a finding, if known; a finding about the model at rest precedes the first step."""
    if finding.step is None:
        return (-1, rule.phase) if rule.phase == Phase.REST else None
    return finding.step, rule.phase


def _place(finding: Finding, order: Mapping[str, int]) -> tuple[int, str]:
    """The position of a finding in the order of execution: of its site, or of the first module inside it."""
    if finding.site in order:
        return order[finding.site], finding.code
    inside = [place for path, place in order.items() if path.startswith(f"{finding.site}.")]
    return min(inside, default=len(order)) if finding.site else -1, finding.code


def _over(cause: Finding, consequences: Sequence[Finding]) -> Finding:
    """A cause with its consequences, never itself; its severity is that of the worst of them."""
    every = [part for finding in consequences for part in (replace(finding, affected=()), *finding.affected)]
    worst = max((cause.severity, *(finding.severity for finding in every)), key=lambda severity: severity.rank)
    affected = [one for one in (*cause.affected, *every) if (one.code, one.site) != (cause.code, cause.site)]
    return replace(cause, severity=worst, affected=tuple(affected))


def _step(finding: Finding) -> int:
    return -1 if finding.step is None else finding.step


def _rank(finding: Finding) -> tuple[int, int, str]:
    return -finding.severity.rank, _step(finding), finding.code
