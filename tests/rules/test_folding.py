"""Folding: one root cause with everything that it explains, for any findings in any order."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchhook import Finding, Rule, Severity, check, measure
from torchhook.rules.causes import folded
from torchhook.rules.rule import Phase

ORDER = {path: number for number, path in enumerate(("stem", "stem.conv", "block.0", "block.1", "head"))}
SITES = ("", *ORDER, "block", "block.1.weight", "nowhere")


def rule(code, *explains, phase=Phase.FORWARD, backward=False):
    """A rule that explains some others, and finds nothing itself."""
    body = {"code": code, "name": code.lower(), "explains": explains, "phase": phase, "backward": backward}
    return type(code, (Rule,), {**body, "find": lambda self, history: iter(())})()


def at(code, site, step=0, severity="error"):
    """A finding that says where it is."""
    return Finding(code, severity, f"{code} at {site}, {step}", site, step)


def fold(*pairs):
    return folded({rule: findings for rule, *findings in pairs}, ORDER)


def flat(findings):
    """All findings, including the affected ones, each without its own affected."""
    for finding in findings:
        yield replace(finding, affected=())
        yield from flat(finding.affected)


# --- one rule


def test_sixty_layers_of_nan_are_one_finding_with_fifty_nine_affected():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(60)))
    with torch.no_grad():
        model[0].weight[2, 3] = torch.nan
    with measure(model, stats=("moments", "channels", "headroom")) as stats:
        model(torch.randn(32, 4))
    for rules in (["TH101"], None):
        (finding,) = check(stats, rules).findings
        assert (finding.code, finding.site, finding.step) == ("TH101", "0", 0)
        assert [other.site for other in finding.affected] == [str(number) for number in range(1, 60)]


def test_the_first_in_execution_order_is_the_root():
    found = [at("AA1", site) for site in ("head", "block.1", "stem.conv", "block.0")]
    (root,) = fold((rule("AA1"), *found))
    assert root.site == "stem.conv"
    assert [other.site for other in root.affected] == ["block.0", "block.1", "head"]


def test_the_last_is_the_root_of_what_travels_with_gradients():
    found = [at("AA1", site) for site in ("block.1", "head", "stem.conv")]
    (root,) = fold((rule("AA1", backward=True), *found))
    assert [root.site, *(other.site for other in root.affected)] == ["head", "block.1", "stem.conv"]


def test_a_finding_never_explains_itself():
    twice, later = at("AA1", "stem", 3), at("AA1", "stem", 7)
    (root,) = fold((rule("AA1", "BB"), later, twice), (rule("BB1", "AA"), at("BB1", "head", 9)))
    assert (root.site, root.step) == ("stem", 3) and [other.code for other in root.affected] == ["BB1"]


def test_an_earlier_step_comes_before_an_earlier_layer():
    (root,) = fold((rule("AA1"), at("AA1", "stem", 7), at("AA1", "head", 3)))
    assert root.site == "head"


def test_the_worst_of_a_rule_is_its_root():
    (root,) = fold((rule("AA1"), at("AA1", "stem", 0, "warning"), at("AA1", "head", 3, "error")))
    assert (root.site, root.severity) == ("head", "error")


def test_a_container_is_where_its_first_layer_is():
    (root,) = fold((rule("AA1"), at("AA1", "head"), at("AA1", "block")))
    assert root.site == "block"


def test_what_a_finding_brought_along_stays_under_it():
    origin = replace(at("AA1", "block.0"), affected=(at("AA1", "block.1"), at("AA1", "head")))
    (root,) = fold((rule("AA1"), origin))
    assert root == origin


def test_nothing_found_is_nothing():
    assert fold() == () and fold((rule("AA1"),)) == ()


# --- across rules


def test_a_consequence_is_folded_under_its_cause():
    (root,) = fold((rule("AA1", "BB"), at("AA1", "stem")), (rule("BB2"), at("BB2", "head"), at("BB2", "block.0")))
    assert root.code == "AA1"
    assert [other.code for other in root.affected] == ["BB2", "BB2"]
    assert {other.site for other in root.affected} == {"head", "block.0"}


def test_a_chain_of_causes_has_one_root():
    rules = rule("AA1", "BB"), rule("BB1", "CC"), rule("CC1", "DD"), rule("DD1")
    (root,) = fold(*((each, at(each.code, "stem", step)) for step, each in enumerate(rules)))
    assert root.code == "AA1"
    assert sorted(other.code for other in root.affected) == ["BB1", "CC1", "DD1"]
    assert not any(other.affected for other in root.affected)


def test_what_came_before_is_no_consequence():
    early, late = rule("AA1", "BB"), rule("BB1")
    roots = fold((early, at("AA1", "stem", 5)), (late, at("BB1", "head", 3)))
    assert [root.code for root in roots] == ["BB1", "AA1"]
    (root,) = fold((early, at("AA1", "stem", 5)), (late, at("BB1", "head", 5)))
    assert root.code == "AA1"


def test_within_a_step_the_phases_come_in_their_order():
    forward, backward = (rule("AA1", "BB", phase=phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
    loss = rule("BB1", phase=Phase.LOSS)
    assert len(fold((forward, at("AA1", "head", 2)), (loss, at("BB1", "", 2)))) == 1
    assert len(fold((backward, at("AA1", "head", 2)), (loss, at("BB1", "", 2)))) == 2


def test_a_model_at_rest_was_there_before_the_first_step():
    rest, forward = rule("AA1", "BB", phase=Phase.REST), rule("BB1", "AA")
    (root,) = fold((forward, at("BB1", "stem", 0)), (rest, at("AA1", "head", None)))
    assert root.code == "AA1"


def test_of_two_that_explain_each_other_the_one_that_runs_first_is_the_cause():
    first, second = rule("AA1", "BB"), rule("BB1", "AA")
    (root,) = fold((first, at("AA1", "head")), (second, at("BB1", "stem")))
    assert root.code == "BB1"
    (root,) = fold((first, at("AA1", "stem")), (second, at("BB1", "head")))
    assert root.code == "AA1"


def test_a_cause_is_as_bad_as_what_it_does():
    (root,) = fold((rule("AA1", "BB"), at("AA1", "stem", 0, "warning")), (rule("BB1"), at("BB1", "head", 0, "error")))
    assert (root.code, root.severity) == ("AA1", "error")


def test_what_is_merely_worth_knowing_explains_no_warning():
    cause, consequence = rule("AA1", "BB"), rule("BB1")
    roots = fold((cause, at("AA1", "stem", 0, "info")), (consequence, at("BB1", "head", 0, "warning")))
    assert [root.code for root in roots] == ["BB1", "AA1"]
    (root,) = fold((cause, at("AA1", "stem", 0, "info")), (consequence, at("BB1", "head", 0, "info")))
    assert root.code == "AA1"


def test_what_a_circle_explains_is_no_root_whoever_is_first_by_its_code():
    circle = [rule("BB1", "BB2", phase=Phase.REST), rule("BB2", "CC1"), rule("CC1", "BB1", "AA1")]
    found = [(one, Finding(one.code, "warning", one.code)) for one in (rule("AA1"), *circle)]
    (root,) = fold(*found)
    assert root.code == "BB1" and sorted(other.code for other in root.affected) == ["AA1", "BB2", "CC1"]


# --- whatever was found


CODES = ("AA1", "AA2", "BB1", "BB2", "CC1")
STEPS, SEVERITIES = st.none() | st.integers(0, 3), st.sampled_from([*Severity])


@st.composite
def found_by_rules(draw, sites=SITES, unique=False):
    """Findings of some rules, each with its own message, with arbitrary relations of cause."""
    found = {}
    facts = st.tuples(st.sampled_from(sites), STEPS, SEVERITIES, st.integers(0, 2))
    many = st.lists(facts, max_size=4, unique_by=(lambda each: each[:3]) if unique else None)
    explained = st.lists(st.sampled_from([*CODES, "AA", "BB", "CC"]), max_size=4)
    for code in draw(st.lists(st.sampled_from(CODES), unique=True)):
        one = rule(code, *draw(explained), phase=draw(st.sampled_from([*Phase])), backward=draw(st.booleans()))
        found[one] = [_finding(code, number, *each) for number, each in enumerate(draw(many))]
    return found


def _finding(code, number, site, step, severity, affected):
    said = f"{code} number {number}"
    below = [Finding(code, severity, f"{said}, {other} passed it on", site, step) for other in range(affected)]
    return Finding(code, severity, said, site, step, affected=tuple(below))


def _messages(findings):
    return sorted(finding.message for finding in flat(findings))


@settings(max_examples=150, deadline=None)
@given(found_by_rules())
def test_every_finding_is_kept_exactly_once_unless_it_is_its_own_root(found):
    roots = folded(found, ORDER)
    own = {(root.code, root.site) for root in roots}
    made = [finding for findings in found.values() for finding in findings]
    repeated = {one.message for one in flat(made) if (one.code, one.site) in own}
    kept = _messages(roots)
    assert len(kept) == len(set(kept)) and set(_messages(made)) - set(kept) <= repeated
    assert not any((one.code, one.site) == (root.code, root.site) for root in roots for one in flat(root.affected))


@settings(max_examples=150, deadline=None)
@given(found_by_rules())
def test_the_worst_comes_first_and_is_the_worst_of_its_own(found):
    roots = folded(found, ORDER)
    ranks = [root.severity.rank for root in roots]
    assert ranks == sorted(ranks, reverse=True)
    assert all(root.severity.rank == max(other.severity.rank for other in flat([root])) for root in roots)


@settings(max_examples=150, deadline=None)
@given(found_by_rules())
def test_whatever_explains_what_there_is_a_root_and_nobody_is_without_one(found):
    roots = folded(found, ORDER)
    assert bool(roots) == any(found.values())
    rules = {rule.code: rule for rule in found}
    for root in roots:
        others = {other.code for other in flat(root.affected)} - {root.code}
        causes = {root.code} | others
        assert all(any(code.startswith(rules[cause].explains) for cause in causes) for code in others)


@settings(max_examples=150, deadline=None)
@given(found_by_rules())
def test_folding_what_is_folded_changes_nothing(found):
    once = folded(found, ORDER)
    rules = {rule.code: rule for rule in found}
    assert folded({rules[root.code]: [root] for root in once}, ORDER) == once


@settings(max_examples=150, deadline=None)
@given(found_by_rules(), st.randoms(use_true_random=False))
def test_the_order_of_rules_does_not_matter(found, dice):
    assert folded(_shuffled(found, dice), ORDER) == folded(found, ORDER)


@settings(max_examples=150, deadline=None)
@given(found_by_rules(sites=("", *ORDER), unique=True), st.randoms(use_true_random=False))
def test_the_order_of_findings_does_not_matter_unless_they_are_of_one_place_and_step(found, dice):
    mixed = {rule: dice.sample(findings, len(findings)) for rule, findings in found.items()}
    assert folded(mixed, ORDER) == folded(found, ORDER)


def _shuffled(found, dice: random.Random):
    """Equal findings as other objects, in another order."""
    return {type(rule)(): found[rule] for rule in dice.sample([*found], len(found))}


def test_a_family_does_not_explain_what_was_there_before_the_training():
    family, exact = rule("TH901", "TH9"), rule("TH902", "TH911")
    before = rule("TH911", phase=Phase.REST)
    for cause, is_explained in ((family, False), (exact, True)):
        roots = fold((cause, at(cause.code, "stem", None)), (before, at("TH911", "head", None)))
        assert ("TH911" not in [root.code for root in roots]) == is_explained
